"""The texts of a plan are for people: whatever they say, the same functions are called with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from cutlass_mla_layers import CAPACITY, decodes, layer_config

from attn_select.reference.running import check_result, run_problem
from attn_select.runtime import attention_group
from attn_select.testing import same_bits, selection_of, with_other_texts
from attn_select_cutlass_mla.facts.builds import BUILDS
from attn_select_cutlass_mla.facts.cutlass_mla import CUTLASS_MLA

SPLITS = [(build.distribution, splits) for build in BUILDS for splits in (-1, 4) if splits == -1 or build.splits.value]


@pytest.mark.parametrize(("provider", "splits"), SPLITS)
def test_texts_decide_nothing(provider: str, splits: int, emulate: Callable[[str], list[dict[str, Any]]]) -> None:
    calls = emulate(provider)
    options = {"provider": provider, "num_kv_splits": splits}
    seen = []
    for spec in (CUTLASS_MLA, with_other_texts(CUTLASS_MLA)):
        selection = selection_of(spec, layer_config(), "b200", options=options)
        group = attention_group(selection, "cpu", CAPACITY, phases=["decode"])
        problem = decodes(group, [9, 0, 300], seed=1)
        calls.clear()
        result = run_problem(group, problem)
        check_result(group, problem, result)
        seen.append((result, [{name: plain(value) for name, value in call.items()} for call in calls]))
    (wanted, wanted_calls), (found, found_calls) = seen
    assert len(wanted_calls) == 1
    assert found_calls == wanted_calls
    assert same_bits(found.output, wanted.output)
    if wanted.lse is not None and found.lse is not None:
        assert same_bits(found.lse, wanted.lse)


def plain(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value
