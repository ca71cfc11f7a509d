"""``attn-select flags``: the choice as an engine's arguments, what ranks higher, and what they do not express."""

from __future__ import annotations

import json
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attn_select import AttentionConfig, select
from attn_select.backends.distributions import known_backends
from attn_select.engines.names import engine_table
from attn_select.testing.toolkit import MLA_FIELDS
from attn_select_cli.flags import ENGINES

MODELS = ("llama-3-8b", "gpt-oss-120b", "gemma-2-9b", "deepseek-v3", "bert-base")
GPUS = ("a100", "h100", "b200", "rtx5090")
FOLDER = Path(__file__).resolve().parents[2]
VLLM_ANSWERS = json.loads((FOLDER / "engines/vllm/tests/vllm_answers_0_33_0.json").read_text("utf-8"))
"""What vLLM 0.33.0's own selector accepts; engines/vllm/tests/vllm_answers.py says how it was asked."""


def flags(run: Any, engine: str, model: str, gpu: str, *options: str) -> dict[str, Any]:
    result = run("flags", "--engine", engine, "--model", model, "--gpu", gpu, *options, "--json")
    assert result.code in (0, 1), result.err
    found: dict[str, Any] = result.json
    assert result.code == (0 if all(layer["engine_backend"] for layer in found["layers"]) else 1)
    return found


@pytest.mark.parametrize(("engine", "model"), [*product(ENGINES, MODELS)])
def test_what_is_named_is_the_first_of_the_order_that_is_not_passed_over(run: Any, engine: str, model: str) -> None:
    for gpu in GPUS:
        found = flags(run, engine, model, gpu)
        explained = run("explain", "--model", model, "--gpu", gpu, "--json").json
        by_kind = {layer["kind"]: layer for layer in explained["layers"]}
        for layer in found["layers"]:
            phase = layer["phases"][-1]
            ranks = {c["backend"]: c["phases"][phase]["rank"] for c in by_kind[layer["kind"]]["candidates"]}
            order = [each["backend"] for each in layer["passed_over"]] + [layer["backend"]] * bool(layer["backend"])
            assert order[:1] == [layer["selected"]] or len(set(by_kind[layer["kind"]]["selected"].values())) > 1
            assert order[1:] == sorted(order[1:], key=lambda name: ranks[name])
            assert all(each["why"] for each in layer["passed_over"])
            assert bool(layer["source"]) is bool(layer["engine_backend"])


@pytest.mark.parametrize(
    ("engine", "model", "gpu", "expected"),
    [
        # What the engine takes by itself is not said.
        ("vllm", "llama-3-8b", "h100", "--dtype bfloat16"),
        ("sglang", "llama-3-8b", "t4", "--attention-backend triton --dtype float16"),
        ("vllm", "deepseek-v3", "b200", "--attention-config.mla_prefill_backend FLASH_ATTN --dtype bfloat16"),
        (
            "vllm",
            "llama-3-8b",
            "b200",
            "--attention-backend FLASHINFER --attention-config.use_trtllm_attention true --dtype bfloat16"
            " --block-size 16",
        ),
        ("sglang", "llama-3-8b", "h100", "--dtype bfloat16"),
        (
            "sglang",
            "deepseek-v3",
            "rtx5090",
            "--prefill-attention-backend flashinfer --decode-attention-backend triton --dtype bfloat16",
        ),
        # Models with a default of their own in SGLang are told, and DSA's cache is always named: its auto may be FP8.
        ("sglang", "gpt-oss-120b", "h100", "--attention-backend fa3 --dtype bfloat16"),
        (
            "sglang",
            "deepseek-v3.2",
            "h200",
            "--attention-backend dsa --dsa-prefill-backend fa3 --dsa-decode-backend fa3 --dtype bfloat16"
            " --kv-cache-dtype bf16",
        ),
        ("transformers", "llama-3-8b", "h100", "--attn-implementation flash_attention_3 --dtype bfloat16"),
        ("trtllm", "llama-3-8b", "b200", "--config attn-select.yaml"),
    ],
)
def test_arguments(run: Any, engine: str, model: str, gpu: str, expected: str) -> None:
    assert " ".join(flags(run, engine, model, gpu)["arguments"]) == expected


def test_tensorrt_llm_reads_a_file(run: Any) -> None:
    found = flags(run, "trtllm", "deepseek-v3", "h100", "--kv-cache-dtype", "fp8", "-tp", "8")
    assert found["arguments"] == ["--tp_size", "8", "--config", "attn-select.yaml"]
    assert found["file"] == {
        "argument": "--config",
        "content": {
            "dtype": "bfloat16",
            "kv_cache_config": {"dtype": "fp8"},
        },
    }
    text = run("flags", "-e", "trtllm", "-m", "deepseek-v3", "-g", "h100", "--kv-cache-dtype", "fp8").out
    yaml = text.partition("attn-select.yaml:\n")[2].partition("\n\n")[0]
    assert yaml == "  dtype: bfloat16\n  kv_cache_config:\n    dtype: fp8"


def test_what_no_argument_says_is_listed(run: Any) -> None:
    def unsaid(engine: str, *options: str) -> str:
        return "\n".join(flags(run, engine, "llama-3-8b", "h100", *options)["not_expressed"])

    assert "a KV cache of fp8_e5m2: TensorRT-LLM stores fp8_e4m3" in unsaid("trtllm", "--kv-cache-dtype", "fp8_e5m2")
    assert "batch invariance: transformers has no argument for it" in unsaid("transformers", "--batch-invariant")
    assert "blocks of 48 tokens" in unsaid("trtllm", "--block-size", "48", "--backend", "FLASHINFER")
    assert "tensor parallelism over 2 ranks" in unsaid("transformers", "-tp", "2")
    assert "num_speculative_tokens = 3" in unsaid("vllm", "--speculative-tokens", "3")
    assert "decode context parallelism over 2 ranks" in unsaid("sglang", "-tp", "16", "--dcp", "2")
    vllm = flags(run, "vllm", "llama-3-8b", "h100", "--batch-invariant")
    assert vllm["environment"] == {"VLLM_BATCH_INVARIANT": "1"}
    assert (
        "--enable-deterministic-inference"
        in flags(run, "sglang", "llama-3-8b", "h100", "--batch-invariant")["arguments"]
    )


def test_text_is_a_command_that_can_be_copied(run: Any, tmp_path: Path) -> None:
    preset = run("flags", "-e", "vllm", "-m", "gpt-oss-120b", "-g", "rtx5090")
    assert "  vllm serve MODEL \\\n    --attention-backend TRITON_ATTN \\\n    --dtype bfloat16 \\\n" in preset.out
    assert (
        "Ranked higher by attn-select, but not taken:\n  FLASHINFER: FLASHINFER of vLLM: needs NVIDIA's" in preset.out
    )
    mla = run("flags", "-e", "vllm", "-m", "deepseek-v3", "-g", "h100", "--kv-cache-dtype", "fp8").out
    assert "  TRITON_MLA for mla, decode: only times of" in mla  # of two reasons each says where
    assert "  TRITON_MLA for mla, prefill: vLLM has no such backend\n" in mla
    assert "attn-select-vllm" not in preset.out  # it does not bring FLASHINFER there
    triton = run("flags", "-e", "vllm", "-m", "llama-3-8b", "-g", "h200").out
    assert "  attn-select-vllm, installed beside vLLM, has attn-select's TRITON_ATTN for it\n" in triton
    assert "attn-select-sglang" not in run("flags", "-e", "sglang", "-m", "llama-3-8b", "-g", "h200").out
    folder = tmp_path / "a model"
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512}
    config |= {"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    assert (
        f"vllm serve '{folder}' \\\n" in run("flags", "-e", "vllm", "-m", str(folder / "config.json"), "-g", "h100").out
    )


def test_an_explicit_choice_is_never_replaced(run: Any) -> None:
    words = ("flags", "-e", "vllm", "-m", "llama-3-8b", "-g", "h100", "--backend")
    refused = run(*words, "FLASHMLA")
    assert refused.code == 1
    assert "FLASHMLA, asked for by name, cannot run this" in refused.err
    assert refused.out == ""
    assert "--attention-backend TRITON_ATTN" in run(*words, "TRITON_ATTN").out


@pytest.mark.parametrize(
    ("engine", "choice", "said"),
    [
        ("vllm", "TORCH_SDPA", "--backend TORCH_SDPA for full_attention, prefill: vLLM has no such backend"),
        ("vllm", "decode=FLASHINFER", "vLLM takes one backend for prefill and decode"),
    ],
)
def test_an_explicit_choice_that_the_engine_does_not_have_is_refused(
    run: Any, engine: str, choice: str, said: str
) -> None:
    refused = run("flags", "-e", engine, "-m", "llama-3-8b", "-g", "h100", "--backend", choice)
    assert (refused.code, refused.out) == (2, "")
    assert said in refused.err
    assert "without --backend" in refused.err


def test_layers_that_the_engine_refuses_have_no_default_there(run: Any) -> None:
    words = ("--engine", "vllm", "--model", "phi-2", "--gpu", "a100", "--kv-cache-dtype", "fp8", "--json")
    found = run("flags", *words).json
    assert found["refused"]["why"]
    assert [layer["engine_default"] for layer in found["layers"]] == [None]
    assert run("explain", *words).json["layers"][0]["engine"]["by_itself"] == "none"


def config_of(layer: dict[str, Any]) -> AttentionConfig:
    fields: dict[str, Any] = {key: layer[key] for key in ("dtype", "kv_cache_dtype", "block_size") if key in layer}
    if layer.get("use_mla"):
        sparse = {"sparse_top_k": 2048} if layer.get("use_sparse") else {}
        return AttentionConfig(**{**MLA_FIELDS, "num_heads": 16}, **sparse, **fields)
    fields |= {"attn_type": layer.get("attn_type", "decoder"), "sinks": layer.get("has_sink", False)}
    fields |= {"sliding_window": 128} if layer.get("has_sliding_window") else {}
    return AttentionConfig(num_heads=32, num_kv_heads=8, head_size=layer["head_size"], **fields)


@pytest.mark.parametrize("gpu", VLLM_ANSWERS["answers"])
def test_vllm_accepts_what_it_is_said_to_have(gpu: str) -> None:
    table = engine_table("vllm")
    assert table.release == VLLM_ANSWERS["vllm"]
    asked = 0
    for layer, answer in VLLM_ANSWERS["answers"][gpu].items():
        selection = select(config_of(VLLM_ANSWERS["layers"][layer]), gpu)
        phases = ("decode",) if selection.config.mla and not selection.config.sparse else selection.config.phases
        for offer in table.offers(selection, phases, "attention"):
            if offer.name is not None:
                refused = answer["refused"][offer.name.name]
                if offer.block_size is not None and not table.takes(offer.name, offer.block_size):
                    assert refused == ["block_size not supported"]
                    continue
                # It was asked without a network, where it counts TRT-LLM's kernels as missing.
                assert refused == [] or (gpu, refused) == ("10.0", ["attention sinks not supported"]), (layer, offer)
                asked += 1
    assert asked > 15


@pytest.mark.parametrize("engine", ENGINES)
def test_tables_name_known_backends_with_sources(engine: str) -> None:
    table = engine_table(engine)
    for name in table.names:
        assert not name.backend or name.backend in known_backends()
        assert name.argument in table.arguments
        assert ".py" in name.source or "kernels/" in name.source
    raw = tomllib.loads((Path(engine_table.__code__.co_filename).parent / f"{engine}.toml").read_text())
    assert {key for row in raw["names"] for key in row} <= {
        *("backend", "name", "argument", "when", "kernels", "block_sizes", "arguments", "own_kernel", "source"),
        *("architectures", "fault", "needs"),
    }
    names = {(name.argument, name.name) for name in table.names}
    taken = {(each.argument, name) for each in table.defaults for name in (each.name, *each.order) if name}
    assert taken <= names
    assert all(".py" in default.source for default in table.defaults)
    assert {key for row in raw.get("defaults", ()) for key in row} <= {
        *("name", "order", "setting", "argument", "when", "architectures", "arguments", "source")
    }


@pytest.mark.parametrize(("key", "engine"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_an_engines_own_kernel_takes_no_place_that_ours_was_measured_for(
    run: Any, tmp_path: Path, key: str, engine: str
) -> None:
    words = ("flags", "--engine", key, "--model", "llama-3-8b", "--gpu", "h200")
    layer = run(*words, "--json").json["layers"][-1]
    assert (layer["selected"], layer["backend"]) == ("TRITON_ATTN", "FLASH_ATTN")
    why = f"only times of attn-select's kernel put it there, and {engine} runs one of its own"
    assert layer["passed_over"] == [{"backend": "TRITON_ATTN", "why": why}]
    assert run(*words, "--backend", "TRITON_ATTN", "--json").json["layers"][-1]["backend"] == "TRITON_ATTN"
    rules = tmp_path / "rules.toml"
    rules.write_text('version = 1\n[[rules]]\nname = "mine"\nprefer = ["TRITON_ATTN"]\n')
    assert run(*words, "--rules", str(rules), "--json").json["layers"][-1]["backend"] == "TRITON_ATTN"


def test_engines_are_told_of_kernels_of_states_where_they_have_arguments(run: Any, tmp_path: Path) -> None:
    words = ("flags", "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--engine")
    vllm = run(*words, "vllm", "--state-dtype", "bfloat16", "--json").json
    assert vllm["layers"][0]["backend"] == "FLASH_ATTN"  # timed, and before FLASHINFER by the rules, which is not
    given = dict(zip(vllm["arguments"][::2], vllm["arguments"][1::2], strict=True))
    assert (given["--gdn-prefill-backend"], given["--mamba-ssm-cache-dtype"]) == ("flashinfer", "bfloat16")
    prefill, decode = vllm["states"]
    assert (prefill["phase"], prefill["backend"], prefill["value"]) == ("prefill", "FLASHINFER_GDN", "flashinfer")
    assert (decode["phase"], decode["backend"], decode["argument"]) == ("decode", None, None)
    sglang = run(*words, "sglang", "--json").json
    assert {"--linear-attn-prefill-backend", "--linear-attn-decode-backend"} <= {*sglang["arguments"]}
    assert sglang["states"][1]["passed_over"] == ["TRITON_STATE"]
    assert "TRITON_STATE: SGLang has no such kernel for gated_delta_net in decode" in run(*words, "sglang").out


def test_a_model_of_states_alone(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "hidden_size": 256}))
    found = run("flags", "--model", str(config), "--engine", "vllm", "--gpu", "h200", "--json")
    assert found.code == 0
    assert found.json["layers"] == []
    assert [(each["phase"], each["value"]) for each in found.json["states"]] == [
        ("prefill", None),
        ("decode", "flashinfer"),
    ]
    assert "--mamba-backend" in found.json["arguments"]


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("llama-3-8b", ("-tp", "8", "--dcp", "3"), "3 does not divide the 8 ranks of tensor parallelism"),
        ("llama-3-8b", ("-tp", "8", "--dcp", "2"), "8 ranks hold one copy of each of the 8 KV heads"),
        ("llama-3-8b", ("-tp", "32", "--dcp", "4"), ""),
        ("gpt-oss-120b", ("-tp", "16"), "vLLM divides the 8 KV heads of this model among the ranks"),
        ("qwen3-next-80b-a3b", ("--batch-invariant",), "vLLM 0.33.0 refuses it for layers that keep a state"),
    ],
)
def test_ranks_and_options_that_vllm_refuses(run: Any, model: str, options: tuple[str, ...], said: str) -> None:
    found = run("flags", "-e", "vllm", "-m", model, "-g", "h100", *options)
    assert found.code == (2 if said else 0)
    assert said in found.err


@pytest.mark.parametrize(
    ("engine", "model", "gpu", "options", "starts"),
    [
        ("vllm", "deepseek-v3.2", "a100", (), False),
        ("vllm", "deepseek-v3.2", "rtx5090", ("--kv-cache-dtype", "fp8_ds_mla"), True),
        ("vllm", "llama-2-7b", "a100", ("--kv-cache-dtype", "bfloat16"), False),  # the model's dtype is float16
        ("vllm", "falcon-7b", "h100", ("--kv-cache-dtype", "fp8"), True),
        ("sglang", "deepseek-v3.2", "h100", ("--batch-invariant",), False),
    ],
)
def test_there_is_no_command_where_an_engine_refuses_or_is_wrong(
    run: Any, engine: str, model: str, gpu: str, options: tuple[str, ...], starts: bool
) -> None:
    words = ("flags", "-e", engine, "-m", model, "-g", gpu, *options)
    found = run(*words, "--json")
    assert (found.code, found.json["refused"]["starts"]) == (1, starts)
    text = run(*words)
    assert f"No command: {found.json['refused']['why']}\n" in text.out
    assert "serve" not in text.out.replace("serves", "")
    assert "Not expressed" not in text.out
    alone = run(*words, "--arguments")
    assert (alone.code, alone.out) == (1, "")
    assert found.json["refused"]["why"] in alone.err


def test_arguments_alone_are_one_line_for_a_shell(run: Any) -> None:
    words = ("flags", "-m", "llama-3-8b", "-g", "h100", "--arguments")
    alone = run(*words, "-e", "vllm", "--batch-invariant", "-tp", "2")
    assert (alone.code, alone.out) == (0, "--dtype bfloat16 --tensor-parallel-size 2\n")
    assert alone.err == "set in the environment: VLLM_BATCH_INVARIANT=1\n"
    of_a_file = run(*words, "-e", "trtllm")
    assert (of_a_file.code, of_a_file.out) == (2, "")
    assert "attn-select.yaml" in of_a_file.err
