"""``explain --engine`` and ``matrix --engine``: what an engine's own backends accept, and which it takes by itself."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.engines import ENGINES
from attn_select.engines.answers import answers
from attn_select.engines.names import engine_table
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import CPU, known_gpus, lookup

LAYER = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
MLA = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SINKS = {**LAYER, "head_size": 64, "sinks": True}


def chosen(engine: str, layer: dict[str, Any], gpu: str, architecture: str = "", setting: str = "") -> str | None:
    table = engine_table(engine)
    found = table.default(AttentionConfig(**layer), lookup(gpu), "attention", architecture, setting)
    return None if found is None else found.name


# What the engines' own code does on a GPU that is not here (`make audit`), and what it reads of the environment.
@pytest.mark.parametrize(
    ("engine", "layer", "gpu", "setting", "name"),
    [
        ("vllm", LAYER, "mi300x", "", "ROCM_ATTN"),
        ("vllm", LAYER, "mi300x", "VLLM_ROCM_USE_AITER=1", "ROCM_ATTN"),
        ("vllm", SINKS, "mi300x", "", "ROCM_AITER_UNIFIED_ATTN"),
        ("vllm", SINKS, "mi300x", "VLLM_ROCM_USE_AITER=1", "ROCM_AITER_FA"),
        ("vllm", SINKS, "mi210", "", "TRITON_ATTN"),
        ("vllm", SINKS, "rx9070xt", "VLLM_ROCM_USE_AITER=1", "ROCM_AITER_UNIFIED_ATTN"),
        ("vllm", {**LAYER, "batch_invariant": True}, "mi355x", "", "TRITON_ATTN"),
        ("vllm", {**LAYER, "decode_context_parallel_size": 2}, "mi355x", "", None),
        ("vllm", MLA, "mi300x", "", "TRITON_MLA"),
        ("vllm", MLA, "mi355x", "VLLM_ROCM_USE_AITER=1", "ROCM_AITER_MLA"),
        ("vllm", {**MLA, "sparse_top_k": 2048}, "mi300x", "", "ROCM_AITER_MLA_SPARSE"),
        ("vllm", LAYER, "rtx-pro-6000", "", "FLASH_ATTN"),
        ("vllm", {**LAYER, "kv_cache_dtype": "fp8_e4m3"}, "rtx5090", "", "FLASHINFER"),
        ("vllm", SINKS, "gb10", "", "FLASHINFER"),
        ("vllm", MLA, "gb10", "", "TRITON_MLA"),
        ("sglang", LAYER, "mi300x", "", "aiter"),
        ("sglang", MLA, "mi300x", "", "aiter"),
        ("sglang", {**MLA, "num_heads": 64}, "mi300x", "", "triton"),
        ("sglang", {**MLA, "sparse_top_k": 2048}, "mi355x", "", "dsa"),
        ("sglang", MLA, "rtx5090", "", "triton"),
    ],
)
def test_what_an_engine_takes_by_itself(
    engine: str, layer: dict[str, Any], gpu: str, setting: str, name: str | None
) -> None:
    assert chosen(engine, layer, gpu, setting=setting) == name


def test_a_model_may_have_a_choice_of_its_own() -> None:
    assert chosen("vllm", LAYER, "mi300x", "Gemma4ForCausalLM") == "TRITON_ATTN"
    assert chosen("sglang", LAYER, "mi300x", "Gemma4ForCausalLM") == "triton"


@pytest.mark.parametrize("engine", ENGINES)
def test_no_backend_of_one_vendor_is_accepted_on_anothers_gpu(engine: str) -> None:
    for layer in (LAYER, SINKS, MLA, {**MLA, "sparse_top_k": 2048}):
        for device in known_gpus().values():
            for each in answers(engine_table(engine), AttentionConfig(**layer), device, "").backends:
                fields = {condition.field for condition in each.row.when}
                if "arch" in fields and not device.arch:
                    assert "compute-capability" in [reason.code for reason in each.reasons]
                if "compute_capability" in fields and device.arch:
                    assert "compute-capability" in [reason.code for reason in each.reasons]


def test_a_default_that_is_taken_accepts_the_layer() -> None:
    """Of the engines whose rows hold all that they have, on every device that the table knows."""
    for layer in (LAYER, SINKS, MLA, {**LAYER, "kv_cache_dtype": "fp8_e4m3"}, {**LAYER, "block_size": 64}):
        for device in (*known_gpus().values(), CPU):
            found = answers(engine_table("vllm"), AttentionConfig(**layer), device, "")
            accepted = {(each.row.argument, each.row.name) for each in found.backends if not each.reasons}
            for (argument, setting), default in found.chosen.items():
                assert not default.order or (argument, default.name) in accepted, (device.name, layer, setting)


def test_explain_says_what_the_engine_takes_and_why_each_other_one_is_not(run: Any) -> None:
    words = ("explain", "--model", "gpt-oss-120b", "--gpu", "mi300x", "--engine", "vllm")
    text = run(*words).out
    assert "ROCM_AITER_UNIFIED_ATTN, by itself (vllm/platforms/rocm.py" in text
    assert "ROCM_AITER_FA, with VLLM_ROCM_USE_AITER=1" in text
    assert "ROCM_AITER_UNIFIED_ATTN: no kernel here; needs aiter" in text
    assert "ROCM_ATTN: no attention sinks" in text
    assert "B12X: arch gfx942 (supported: 12.0, 12.1)" in run(*words, "--full").out
    for layer in run(*words, "--json").json["layers"]:
        engine = layer["engine"]
        assert engine["by_itself"] == "ROCM_AITER_UNIFIED_ATTN"
        by_name = {one["name"]: one for one in engine["backends"] if one["argument"] == "attention"}
        assert [reason["code"] for reason in by_name["ROCM_ATTN"]["reasons"]] == ["sinks"]
        assert by_name["TRITON_ATTN"]["backend"] == "TRITON_ATTN"
        assert by_name["ROCM_AITER_FA"]["backend"] is None
        assert all("compute-capability" not in one["source"] and one["source"] for one in by_name.values())
    assert "engine" not in run(*words[:-2], "--json").json["layers"][0]
    assert run(*words[:-1], "vlm").code == 2


def test_faults_are_marked_and_flags_goes_round_them(run: Any) -> None:
    gemma = ("--model", "gemma-2-9b", "--gpu", "mi355x", "--engine", "vllm")
    assert "known wrong: it leaves the logits soft cap out" in run("explain", *gemma).out
    layer = run("flags", *gemma, "--json").json["layers"][0]
    assert (layer["engine_default"], layer["engine_backend"]) == ("ROCM_ATTN", "TRITON_ATTN")


def test_flags_leaves_the_engines_own_choice_on_amds_gpus(run: Any) -> None:
    words = ("flags", "--engine", "vllm", "--model", "llama-3-8b", "--gpu", "mi300x")
    found = run(*words, "--json")
    assert found.code == 0
    assert "--attention-backend" not in found.json["arguments"]
    assert "ROCM_ATTN, its default" in run(*words).out
    assert "--attention-backend TRITON_ATTN" in run(*words, "--backend", "TRITON_ATTN").out
    parallel = run("flags", "--engine", "vllm", "--model", "llama-3-70b", "--gpu", "mi300x", "-tp", "16", "--dcp", "2")
    assert parallel.code == 1
    assert "vLLM 0.33.0 has no backend for them on this GPU" in parallel.out


def test_the_matrix_of_an_engine(run: Any) -> None:
    words = ("matrix", "--model", "deepseek-v3", "--gpu", "mi300x", "--gpu", "rtx-pro-6000", "--engine", "vllm")
    assert run(*words).out.splitlines()[1].split()[4:] == 2 * ["FLASH_ATTN", "/", "TRITON_MLA"]
    assert [cell["engine"]["name"] for cell in run(*words, "--json").json["cells"]] == ["vllm", "vllm"]
