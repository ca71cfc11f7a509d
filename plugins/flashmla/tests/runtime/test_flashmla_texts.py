"""The texts of a plan are for people: whatever they say, the same functions are called in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from flashmla_layers import group_of, layer_config

from attn_select.backends.spec import BackendSpec
from attn_select.reference.running import check_result, problem_for, run_problem
from attn_select.testing import same_bits, with_other_texts
from attn_select_flashmla.facts.builds import BUILDS, FlashMLABuild
from attn_select_flashmla.facts.flashmla import FLASHMLA
from attn_select_flashmla.facts.flashmla_sparse import FLASHMLA_SPARSE

DECODES, MIXED = [(1, 40), (1, 3), (1, 70)], [(1, 40), (1, 3), (17, 70)]
LAYERS: dict[str, tuple[BackendSpec, dict[str, Any], list[tuple[int, int]]]] = {
    "dense": (FLASHMLA, {}, DECODES),
    "dense FP8": (FLASHMLA, {"kv_cache_dtype": "fp8_e4m3"}, DECODES),
    "sparse": (FLASHMLA_SPARSE, {"sparse_top_k": 64}, MIXED),
    "sparse FP8": (FLASHMLA_SPARSE, {"sparse_top_k": 64, "kv_cache_dtype": "fp8_ds_mla"}, MIXED),
    "copy": (FLASHMLA_SPARSE, {"sparse_top_k": 64, "kv_cache_dtype": "fp8_ds_mla", "num_heads": 40}, MIXED),
}
CASES = [(build, name) for build in BUILDS for name in LAYERS if name != "dense FP8" or build.dense_fp8.value]


@pytest.mark.parametrize(("build", "name"), CASES, ids=[f"{build.distribution}, {name}" for build, name in CASES])
def test_texts_decide_nothing(build: FlashMLABuild, name: str, emulate: Callable[[str], list[str]]) -> None:
    spec, fields, requests = LAYERS[name]
    calls = emulate(build.distribution)
    seen = []
    for one in (spec, with_other_texts(spec)):
        group = group_of(layer_config(**fields), build.distribution, spec=one)
        problem = problem_for(group, requests, seed=1)
        calls.clear()
        result = run_problem(group, problem)
        check_result(group, problem, result)
        seen.append((result, [*calls]))
    (wanted, wanted_calls), (found, found_calls) = seen
    assert wanted_calls
    assert found_calls == wanted_calls
    assert same_bits(found.output, wanted.output)
    assert wanted.lse is not None
    assert found.lse is not None
    assert same_bits(found.lse, wanted.lse)
