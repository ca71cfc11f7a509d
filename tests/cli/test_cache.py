"""``attn-select cache``: the id of a cache, whether two sides fit, and in what they differ."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

MODEL = ("--model", "llama-3-8b")


def test_one_side_shows_its_cache(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100", "--no-times")
    assert result.code == 0
    cells = re.split(r"  +", result.out.splitlines()[-1])
    assert cells[:4] == ["full_attention × 32", "kv1-04fc50e12331", "FLASH_ATTN_NHD", "16"]
    assert cells[4:] == ["bfloat16", "8 × 128", "4096 per token", "FLASH_ATTN"]


def test_a_hybrid_model_has_states_and_blocks(run: Any) -> None:
    result = run("cache", "--model", "qwen3-next-80b-a3b", "--gpu", "h200")
    assert result.code == 0
    states, blocks = (re.split(r"  +", line) for line in result.out.splitlines()[-2:])
    assert states[0] == "gated_delta_net × 36"
    assert states[1].startswith("st1-")
    assert states[2:6] == ["STATE_VK", "-", "float32", "32 × 128 × 128"]
    assert states[6] == "2146304 per request"
    assert blocks[1].startswith("kv1-")


def test_sides_with_states_name_their_differences(run: Any) -> None:
    result = run("cache", "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--to", "--gpu b200")
    assert result.code == 1
    *_, states, blocks, verdict = result.out.splitlines()
    assert states == "gated_delta_net: state_layout  STATE_VK -> STATE_KV"
    assert blocks == "full_attention: layout  FLASH_ATTN_NHD -> FLASHINFER_HND"
    assert "attn_select.runtime.convert_kv_cache turns one side's blocks" in verdict
    assert "attn_select.runtime.states.convert_states turns one side's states" in verdict


def test_attention_alone_names_the_conversion_of_blocks_alone(run: Any) -> None:
    *_, fact, verdict = run("cache", *MODEL, "--gpu", "a100", "--to", "--gpu b200").out.splitlines()
    assert fact == "full_attention: layout  FLASH_ATTN_NHD -> FLASHINFER_HND"
    assert "convert_kv_cache" in verdict
    assert "convert_states" not in verdict


def test_states_of_other_ranks_and_other_gpus(run: Any) -> None:
    layer = ("cache", "--recurrence", "kda", "--num-heads", "4", "--head-size", "64", "--gpu", "h200")
    ranks = run(*layer, "--to", "-tp 2")
    assert ranks.code == 1
    assert "kda: num_v_heads  4 -> 2" in ranks.out
    assert "which no conversion changes" in ranks.out
    alike = run(*layer, "--to", "--gpu h100")
    assert alike.code == 0
    assert "Both sides fit: blocks and states can be copied byte by byte." in alike.out


def test_sides_of_one_layout_fit(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100", "--to", "--gpu a100")
    assert result.code == 0
    assert "Both sides fit: blocks and states can be copied byte by byte." in result.out


def test_other_heads_cannot_be_made_to_fit(run: Any) -> None:
    layer = ("--num-heads", "32", "--num-kv-heads", "8", "--head-size", "128")
    result = run("cache", *layer, "--gpu", "h100", "--to", "--num-kv-heads 4 --kv-cache-dtype fp8")
    assert result.code == 1
    assert [line.removeprefix("full_attention: ") for line in result.out.splitlines() if "->" in line] == [
        "dtype  bfloat16 -> fp8_e4m3",
        "scales  none -> per_tensor",
        "num_kv_heads  8 -> 4",
    ]
    assert "which no conversion changes" in result.out


def test_a_side_with_other_kinds_of_layers_does_not_fit(run: Any) -> None:
    layer = ("--num-heads", "8", "--head-size", "128", "--gpu", "h100")
    result = run("cache", *layer, "--to", "--sliding-window 128")
    assert result.code == 1
    assert result.out.splitlines()[-3:] == [
        "full_attention: no such layers on the decode side",
        "sliding_attention: no such layers on the prefill side",
        "The sides do not fit: they have other kinds of layers.",
    ]


def test_layers_that_share_a_cache_are_counted(run: Any) -> None:
    trial = Path(__file__).parents[1] / "models" / "data" / "trial"
    result = run("cache", "--model", str(trial / "g3n.json"), "--gpu", "h100")
    names = [line.split("  ")[0] for line in result.out.splitlines()[-2:]]
    assert names == ["sliding_attention × 24, 16 own one", "full_attention × 6, 4 own one"]


def test_a_layer_without_a_backend_is_no_fit(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100", "--to", "--backend FLASHMLA")
    assert result.code == 1
    assert "Both sides fit" not in result.out
    assert "No backend: `attn-select explain`" in result.out


def test_a_model_whose_layers_keep_no_cache(run: Any) -> None:
    result = run("cache", "--model", "bert-base", "--gpu", "a100", "--to", "--gpu h100")
    assert result.code == 0
    assert "no cache" in result.out
    assert result.out.splitlines()[-1] == "No cache: these layers keep none."


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "b200"), "--to 'b200' is no option: write an option and its value, such as --to '--gpu b200'"),
        (("--to", "h200"), "--to 'h200' is no option: write an option and its value, such as --to '--gpu h200'"),
        (("--to", "h2000"), "--to 'h2000' is no option: write an option and its value, such as --to '--gpu b200'"),
        (("--to", ""), "--to '': expected options that differ, and no model: both sides run the same"),
        (
            ("--to", "--model deepseek-v3"),
            "--to '--model deepseek-v3': expected options that differ, and no model: both sides run the same",
        ),
    ],
)
def test_wrong_use_is_named(run: Any, arguments: tuple[str, ...], said: str) -> None:
    result = run("cache", *MODEL, *arguments)
    assert (result.code, result.err.splitlines()[0]) == (2, f"error: {said}")
