"""``attn-select cache``: the id of a cache, whether two sides fit, and the options that make them fit."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

MODEL = ("--model", "llama-3-8b")


def test_one_side_shows_its_cache(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100", "--no-times")
    assert result.code == 0
    cells = re.split(r"  +", result.out.splitlines()[-1])
    assert cells[:4] == ["full_attention × 32", "kv1-04fc50e12331", "FLASH_ATTN_NHD", "16"]
    assert cells[4:] == ["bfloat16", "8 × 128", "4096 per token", "FLASH_ATTN"]


def test_sides_with_states_fit_by_an_option_for_each(run: Any) -> None:
    asked = ("cache", "--model", "qwen3-next-80b-a3b", "--gpu", "h200", "--gpu", "b200")
    result = run(*asked, "--json")
    assert result.code == 1
    differences = {each["fact"]: each for each in result.json["differences"]}
    assert set(differences) == {"state_layout", "layout"}
    assert all(each["converted"] for each in differences.values())
    options = result.json["arguments"]
    assert options == {"prefill": ["--backend FLA"], "decode": ["--backend FLASH_ATTN"]}
    told = run(*asked).out
    assert "attn_select.runtime.states.convert_states turns one side's states into the other's." in told


def test_another_layout_names_the_option_that_removes_it(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "a100", "--gpu", "b200")
    assert result.code == 1
    assert "full_attention: layout  FLASH_ATTN_NHD -> FLASHINFER_HND" in result.out
    assert "The sides fit when you give the decode side --backend FLASH_ATTN. Or attn_select.runtime." in result.out


def test_other_heads_cannot_be_made_to_fit(run: Any) -> None:
    layer = ("--num-heads", "32", "--num-kv-heads", "8", "--head-size", "128")
    result = run("cache", *layer, "--gpu", "h100", "--to", "--num-kv-heads 4")
    assert result.code == 1
    assert "no option of either side removes it" in result.out
    assert "They keep other heads or tokens on a rank, which no conversion changes." in result.out


@settings(max_examples=12)
@given(
    model=st.sampled_from(["llama-3-8b", "gpt-oss-120b", "deepseek-v3", "gemma-3-27b"]),
    gpus=st.tuples(*[st.sampled_from(["a100", "h100", "b200", "rtx5090"])] * 2),
    to=st.sampled_from(["--block-size 64", "--kv-cache-dtype fp8", "-tp 2", "--dtype float16"]),
)
def test_the_named_options_do_make_the_sides_fit(run: Any, model: str, gpus: tuple[str, str], to: str) -> None:
    found = run("cache", "--model", model, "--gpu", gpus[0], "--to", f"--gpu {gpus[1]} {to}", "--json")
    if found.code == 2 or not found.json["arguments"]:
        return
    sides = (("prefill", f"--gpu {gpus[0]}"), ("decode", f"--gpu {gpus[1]} {to}"))
    ids = []
    for side, own in sides:
        options = shlex.split(" ".join((own, *found.json["arguments"].get(side, []))))
        alone = run("cache", "--model", model, *options, "--json")
        ids.append([layer["fingerprint"] for layer in alone.json["sides"][0]["layers"]])
    assert ids[0] == ids[1]


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
