"""Options: values in any case, options without effect, and hints for values that are nearly right."""

from __future__ import annotations

from typing import Any

import pytest

LLAMA = ("--model", "llama-3-8b", "--gpu", "h100")
KDA = ("--recurrence", "kda", "--num-heads", "8", "--head-size", "128", "--gpu", "h100")


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (("--cuda-graph", "always"), "cuda_graph", "ALWAYS"),
        (("--cuda-graph", "uniform-batch"), "cuda_graph", "UNIFORM_BATCH"),
        (("--attn-type", "Decoder"), "attn_type", "decoder"),
        (("--dtype", "BFloat16"), "dtype", "bfloat16"),
        (("--kv-cache-dtype", "FP8_E4M3"), "kv_cache_dtype", "fp8_e4m3"),
        (("--kv-cache-dtype", "FP8"), "kv_cache_dtype", "fp8_e4m3"),
        (("--output-quantization", "FP8"), "output_quantization", "fp8"),
        (("--tp", "2"), "num_heads", 16),
    ],
)
def test_values_are_taken_in_any_case(run: Any, options: tuple[str, ...], field: str, value: Any) -> None:
    result = run("explain", *LLAMA, *options, "--json")
    assert result.json["layers"][0]["config"][field] == value


def test_names_of_phases_engines_and_recurrences_are_taken_in_any_case(run: Any) -> None:
    chosen = run("explain", *LLAMA, "--backend", "Decode=flash-attn", "--json").json["layers"][0]
    assert chosen["selected"]["decode"] == "FLASH_ATTN"
    assert run("flags", *LLAMA, "--engine", "vLLM").code == 0
    assert run("explain", "--recurrence", "KDA", *KDA[2:], "--json").json["layers"][0]["kind"] == "kda"
    assert run("rules", "prefer", "FLASH_ATTN", "--phase", "DECODE", "--model", "llama-3-8b").code == 1
    wrong = run("explain", *LLAMA, "--cuda-graph", "sometimes")
    assert (wrong.code, "cuda_graph = 'sometimes'" in wrong.err) == (2, True)


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ((*LLAMA, "--recurrence", "kda"), "--recurrence"),
        ((*LLAMA, "--num-v-heads", "8"), "--num-v-heads"),
        ((*KDA, "--sliding-window", "128"), "--sliding-window"),
        ((*KDA, "--block-size", "16"), "--block-size"),
        ((*KDA, "--dcp", "2"), "--dcp"),
        ((*KDA, "--mla"), "--mla"),
        (("--model", "glm-5", "--gpu", "h100", "--mla"), "--mla"),
        (("--model", "minicpm3-4b", "--gpu", "h100", "--mla", "--v-head-dim", "32"), "--mla"),
        (("--model", "bert-base", "--gpu", "h100", "--block-size", "16"), "--block-size"),
        (("--model", "bert-base", "--model", "modernbert-base", "--gpu", "h100", "--dcp", "2"), "--dcp"),
    ],
)
def test_an_option_without_effect_is_an_error(run: Any, asked: tuple[str, ...], option: str) -> None:
    result = run("explain", *asked)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {option}: no effect on ")
    assert run("explain", *asked, "--json").json["error"]["code"] == "invalid-config"
