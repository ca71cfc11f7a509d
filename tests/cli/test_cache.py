"""``attn-select cache``: the id of a cache, whether two sides fit, and the options that make them fit."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MODEL = ("--model", "llama-3-8b")


def test_one_side_shows_its_cache(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100")
    assert result.code == 0
    cells = re.split(r"  +", result.out.splitlines()[-1])
    assert cells[:4] == ["full_attention × 32", "kv1-04fc50e12331", "FLASH_ATTN_NHD", "16"]
    assert cells[4:] == ["bfloat16", "8 × 128", "4096", "FLASH_ATTN"]


def test_layers_that_keep_a_state_are_named(run: Any) -> None:
    said = "36 gated_delta_net layers are left out: this command is for attention"
    for gpus in (("h200",), ("h200", "h200")):
        asked = ("cache", "--model", "qwen3-next-80b-a3b", *(each for gpu in gpus for each in ("--gpu", gpu)))
        assert said in run(*asked).out
        assert run(*asked, "--json").json["warnings"] == [said]


def test_a_layer_that_keeps_a_state_has_no_kv_cache(run: Any) -> None:
    for gpus in (("--gpu", "h200"), ("--gpu", "h200", "--gpu", "b200")):
        result = run("cache", "--recurrence", "kda", "--num-heads", "4", "--head-size", "64", *gpus)
        assert result.code == 2
        assert "1 kda layers are left out: this command is for attention" in result.err


def test_sides_of_one_layout_fit(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100", "--gpu", "a100")
    assert result.code == 0
    assert "Both sides fit: blocks can be copied byte by byte." in result.out


def test_another_layout_names_the_option_that_removes_it(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100", "--gpu", "b200")
    assert result.code == 1
    assert "full_attention: layout  FLASH_ATTN_NHD -> FLASHINFER_HND" in result.out
    assert "The sides fit when you give the decode side --backend FLASH_ATTN. Or attn_select.runtime." in result.out


def test_a_difference_that_goes_with_another_is_not_called_permanent(run: Any) -> None:
    result = run("cache", *MODEL, "--gpu", "h100", "--to", "--kv-cache-dtype fp8 -tp 4", "--json")
    differences = {each["fact"]: each for each in result.json["differences"]}
    assert differences["dtype"]["argument"] == differences["scales"]["argument"] == "--kv-cache-dtype bfloat16"
    assert not differences["num_kv_heads"]["converted"]
    assert result.json["arguments"] == {"decode": ["--kv-cache-dtype bfloat16", "--tensor-parallel 1"]}


def test_other_heads_cannot_be_made_to_fit(run: Any) -> None:
    layer = ("--num-heads", "32", "--num-kv-heads", "8", "--head-size", "128")
    result = run("cache", *layer, "--gpu", "h100", "--to", "--num-kv-heads 4")
    assert result.code == 1
    assert "no option of either side removes it" in result.out
    assert "They keep other heads or tokens on a rank, which no conversion changes." in result.out


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
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


def test_a_model_whose_layers_keep_no_cache(run: Any) -> None:
    result = run("cache", "--model", "bert-base", "--gpu", "a100", "--gpu", "h100")
    assert (result.code, result.out.splitlines()[-1]) == (0, "No cache: these layers keep none.")


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
