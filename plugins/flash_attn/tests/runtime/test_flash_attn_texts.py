"""The texts of a plan are for people: whatever they say, the same functions are called with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from flash_attn_layers import small_layer

from attn_select.backends.spec import BackendSpec
from attn_select.layer.config import AttentionConfig
from attn_select.reference.running import check_result, problem_for, run_problem
from attn_select.runtime import Capacity, attention_group
from attn_select.testing import mla_layer, same_bits, selection_of, with_other_texts
from attn_select_flash_attn.facts.builds import BUILDS, FlashAttnBuild
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN
from attn_select_flash_attn.facts.flash_attn_mla import FLASH_ATTN_MLA

GPUS = {2: "a100", 3: "h100", 4: "b200"}
Emulate = Callable[[str], list[dict[str, Any]]]


def plain(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def assert_texts_decide_nothing(
    spec: BackendSpec, config: AttentionConfig, gpu: str, options: dict[str, Any], calls: list[dict[str, Any]]
) -> None:
    """Run the same step by a spec and by one with other texts, and compare calls and results."""
    seen = []
    for one in (spec, with_other_texts(spec)):
        group = attention_group(selection_of(one, config, gpu, options=options), "cpu", Capacity(8, 128, 256))
        problem = problem_for(group, [(1, 40), (1, 3), (17, 33)], seed=1)
        calls.clear()
        result = run_problem(group, problem)
        seen.append(([{name: plain(value) for name, value in call.items()} for call in calls], result))
    (wanted, result), (found, other) = seen
    assert wanted
    assert found == wanted
    check_result(group, problem, other)
    assert same_bits(other.output, result.output)
    assert result.lse is not None
    assert other.lse is not None
    assert same_bits(other.lse, result.lse)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.label)
def test_texts_decide_nothing(build: FlashAttnBuild, emulate: Emulate) -> None:
    calls = emulate(build.distribution)
    options = {"provider": build.distribution, "version": build.version}
    assert_texts_decide_nothing(FLASH_ATTN, small_layer(), GPUS[build.version], options, calls)


@pytest.mark.parametrize("fields", [{"alibi": True}, {"kv_cache_dtype": "fp8"}, {"attn_type": "encoder_only"}], ids=str)
def test_texts_decide_nothing_of_features(fields: dict[str, Any], emulate: Emulate) -> None:
    assert_texts_decide_nothing(FLASH_ATTN, small_layer(**fields), "h100", {"provider": "vllm"}, emulate("vllm"))


@pytest.mark.parametrize("version", [2, 3])
def test_texts_decide_nothing_of_mla(version: int, emulate: Emulate) -> None:
    options = {"provider": "vllm", "prefill_version": version}
    assert_texts_decide_nothing(FLASH_ATTN_MLA, mla_layer(num_heads=4), "h100", options, emulate("vllm"))
