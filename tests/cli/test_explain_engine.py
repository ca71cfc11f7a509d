"""``explain --engine`` and ``matrix --engine``: what an engine's own backends accept, and which it takes by itself."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.engines.answers import answers
from attn_select.engines.names import engine_table
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import lookup

LAYER = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
MLA = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
SINKS = {**LAYER, "head_size": 64, "sinks": True}


# What is taken without a setting is held to the engines' own code (tests/engines/audit/test_recorded_answers.py).
@pytest.mark.parametrize(
    ("layer", "gpu", "by_default", "with_aiter"),
    [
        (LAYER, "mi300x", "ROCM_ATTN", "ROCM_ATTN"),
        (SINKS, "mi300x", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_FA"),
        (SINKS, "rx9070xt", "TRITON_ATTN", "ROCM_AITER_UNIFIED_ATTN"),
        (MLA, "mi355x", "TRITON_MLA", "ROCM_AITER_MLA"),
        (MLA, "gb10", "TRITON_MLA", "TRITON_MLA"),
    ],
)
def test_what_vllm_takes_by_itself(layer: dict[str, Any], gpu: str, by_default: str, with_aiter: str) -> None:
    for setting, name in (("", by_default), ("VLLM_ROCM_USE_AITER=1", with_aiter)):
        found = engine_table("vllm").default(AttentionConfig(**layer), lookup(gpu), "attention", "", setting)
        assert found is not None
        assert found.name == name


def test_what_only_a_setting_brings_is_named() -> None:
    config = AttentionConfig(**MLA | {"qk_nope_head_dim": 100})
    chosen = answers(engine_table("vllm"), config, lookup("mi300x"), "").chosen
    assert chosen["mla_prefill", "VLLM_ROCM_USE_AITER=1"].name == "ROCM_AITER_FA"
    assert ("mla_prefill", "") not in chosen


def test_layers_that_the_engine_runs_otherwise_are_not_asked_about(run: Any) -> None:
    words = ("--engine", "vllm", "--model", "minicpm3-4b", "--gpu", "a100", "--kv-cache-dtype", "fp8")
    how = "runs them in another way, by its default: its layers of latent attention run as attention with keys and"
    assert how in run("flags", *words).out
    text = run("explain", *words).out
    assert f"vLLM 0.33.0      {how}" in text
    assert "refuses to start" not in text
    engine = run("explain", *words, "--json").json["layers"][0]["engine"]
    assert (engine["by_itself"], engine["chosen"], engine["backends"]) == ("-", [], [])
    assert engine["otherwise"].startswith("its layers of latent attention run as attention")


def test_explain_says_what_the_engine_takes_and_why_each_other_one_is_not(run: Any) -> None:
    words = ("explain", "--model", "gpt-oss-120b", "--gpu", "mi300x", "--engine", "vllm")
    text = run(*words).out
    assert "ROCM_AITER_UNIFIED_ATTN, by itself (vllm/platforms/rocm.py" in text
    assert "ROCM_AITER_FA, with VLLM_ROCM_USE_AITER=1" in text
    assert "ROCM_AITER_UNIFIED_ATTN: no kernel here; needs aiter" in text
    assert "ROCM_ATTN: no attention sinks" in text
    for layer in run(*words, "--json").json["layers"]:
        engine = layer["engine"]
        assert engine["by_itself"] == "ROCM_AITER_UNIFIED_ATTN"
        by_name = {one["name"]: one for one in engine["backends"] if one["argument"] == "attention"}
        assert [reason["code"] for reason in by_name["ROCM_ATTN"]["reasons"]] == ["sinks"]
        assert (by_name["TRITON_ATTN"]["backend"], by_name["ROCM_AITER_FA"]["backend"]) == ("TRITON_ATTN", None)
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
    assert "--attention-backend TRITON_ATTN" in run(*words, "--backend", "TRITON_ATTN").out


def test_the_matrix_of_an_engine(run: Any) -> None:
    words = ("matrix", "--model", "deepseek-v3", "--gpu", "mi300x", "--gpu", "rtx-pro-6000", "--engine", "vllm")
    assert run(*words).out.splitlines()[1].split()[4:] == 2 * ["FLASH_ATTN", "/", "TRITON_MLA"]
    assert [cell["engine"]["name"] for cell in run(*words, "--json").json["cells"]] == ["vllm", "vllm"]


def test_a_gpu_of_amds_by_half_its_name(run: Any) -> None:
    found = run("explain", "--model", "llama-3-8b", "--gpu", "mi300")
    assert found.code == 2
    assert "did you mean mi300x" in found.err
    assert "gfx942" in found.err
