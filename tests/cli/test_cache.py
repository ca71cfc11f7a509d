"""``attn-select cache``: the id of a cache, whether two sides fit, and in what they differ."""

from __future__ import annotations

import re
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
    sides = ("cache", "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--gpu", "b200")
    result = run(*sides, "--json")
    assert (result.code, result.json["fits"]) == (1, False)
    differences = {each["fact"]: each for each in result.json["differences"]}
    assert set(differences) == {"state_layout", "layout"}
    assert all(each["converted"] and each["option"] == "--backend" for each in differences.values())
    told = run(*sides).out
    assert "attn_select.runtime.states.convert_states turns one side's states into the other's." in told


def test_states_of_other_ranks_and_dtypes(run: Any) -> None:
    layer = ("cache", "--recurrence", "kda", "--num-heads", "4", "--head-size", "64", "--gpu", "h200")
    ranks = run(*layer, "--to", "-tp 2", "--json").json
    assert [(each["fact"], each["option"], each["converted"]) for each in ranks["differences"]] == [
        ("num_v_heads", "--tensor-parallel", False)
    ]
    alike = run(*layer, "--to", "--gpu h100")
    assert alike.code == 0
    assert "Both sides fit: blocks and states can be copied byte by byte." in alike.out


def test_sides_of_one_layout_fit(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100", "--gpu", "a100")
    assert result.code == 0
    assert "Both sides fit: blocks and states can be copied byte by byte." in result.out


def test_another_layout_names_its_option_and_the_conversion(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "a100", "--gpu", "b200")
    assert result.code == 1
    assert "full_attention: layout  FLASH_ATTN_NHD -> FLASHINFER_HND\n  --backend changes it" in result.out
    assert "attn_select.runtime.convert_kv_cache turns one side's blocks into the other's." in result.out


def test_other_heads_cannot_be_made_to_fit(run: Any) -> None:
    layer = ("--num-heads", "32", "--num-kv-heads", "8", "--head-size", "128")
    result = run("cache", *layer, "--gpu", "h100", "--to", "--num-kv-heads 4 --kv-cache-dtype fp8", "--json")
    assert result.code == 1
    differences = {each["fact"]: each["converted"] for each in result.json["differences"]}
    assert differences == {"dtype": True, "scales": True, "num_kv_heads": False}


def test_a_model_whose_layers_keep_no_cache(run: Any) -> None:
    result = run("cache", "--model", "bert-base", "--gpu", "a100", "--gpu", "h100")
    assert result.code == 0
    assert "No cache: these layers keep none." in result.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h100") * 3, "--gpu is given 3 times: a cache has a prefill side and a decode side"),
        (("--to", ""), "--to is empty: name an option that differs, such as --to '--block-size 64'"),
        (("--to", "--model deepseek-v3"), "--to names a model: both sides of a cache run the same one"),
    ],
)
def test_wrong_use_is_named(run: Any, arguments: tuple[str, ...], said: str) -> None:
    result = run("cache", *MODEL, *arguments)
    assert (result.code, result.err.splitlines()[0]) == (2, f"error: {said}")
