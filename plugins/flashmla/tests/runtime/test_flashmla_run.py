"""``FLASHMLA`` at run time on emulated kernels: every build, queries of different lengths, schedules, empty rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attn_select.runtime import Outputs

pytest.importorskip("torch")

import flashmla_emulated
import torch
from flashmla_layers import check, group_of, layer_config

from attn_select.errors import KernelMismatchError
from attn_select.reference.running import common_of, layer_of, problem_for
from attn_select_flashmla.facts.builds import BUILDS
from attn_select_flashmla.runtime.adapters import TensorSchedule
from attn_select_flashmla.runtime.flashmla import FlashMLAMetadata

Emulate = Callable[[str], list[str]]
NAMES = [build.distribution for build in BUILDS]
FP8_NAMES = [build.distribution for build in BUILDS if build.dense_fp8.value]
DECODES = [(1, 1), (1, 64), (1, 65), (1, 200)]


@pytest.mark.parametrize("requests", [DECODES, [(1, 1), (3, 3), (2, 66), (3, 100)]], ids=["one token", "several"])
@pytest.mark.parametrize("build", FP8_NAMES)
def test_fp8(emulate: Emulate, build: str, requests: list[tuple[int, int]]) -> None:
    calls = emulate(build)
    check(group_of(layer_config(kv_cache_dtype="fp8_e4m3", num_speculative_tokens=2), build), requests)
    assert calls == ["schedule", "flash_mla_with_kvcache_fp8"]


def test_query_lengths_bounded_from_above(emulate: Emulate) -> None:
    emulate("vllm")
    check(group_of(layer_config(num_speculative_tokens=3)), [(2, 10), (2, 70)], max_query_len=4)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_rows_without_keys(emulate: Emulate, kv_cache_dtype: str) -> None:
    emulate("vllm")
    group = group_of(layer_config(kv_cache_dtype=kv_cache_dtype, num_speculative_tokens=1))
    result = check(group, [(2, 0), (2, 9), (2, 0)])
    empty = torch.tensor([0, 1, 4, 5])
    assert result.lse is not None
    assert bool((result.output[empty] == 0).all())
    assert bool(result.lse[empty].isneginf().all())
    assert bool(result.lse[2:4].isfinite().all())


@pytest.mark.parametrize("build", NAMES)
def test_layers_share_one_schedule(emulate: Emulate, build: str) -> None:
    calls = emulate(build)
    group = group_of(layer_config(), build)
    problem = problem_for(group, DECODES)
    assert problem.kv_cache is not None
    metadata = group.build(common_of(problem))
    assert calls == []  # nothing is launched by build
    for _ in range(3):
        layer = layer_of(group, problem)
        layer(problem.query, problem.key, problem.value, problem.kv_cache.clone(), metadata)
    assert calls.count("schedule") == 1
    assert calls.count("flash_mla_with_kvcache") == 3


@pytest.mark.parametrize(("build", "kv_cache_dtype"), [("vllm", "auto"), ("vllm", "fp8_e4m3"), ("sgl-kernel", "auto")])
def test_captures_begin_with_an_empty_schedule(emulate: Emulate, build: str, kv_cache_dtype: str) -> None:
    """So that the graph holds the scheduling, and a replay with other lengths schedules anew."""
    emulate(build)
    group = group_of(layer_config(kv_cache_dtype=kv_cache_dtype), build, cuda_graphs=True)
    problem = problem_for(group, DECODES)
    common = common_of(problem)
    assert problem.kv_cache is not None
    made = []
    for _ in range(2):
        metadata = group.build_for_cudagraph_capture(common)
        inner: FlashMLAMetadata = metadata.parts[0].metadata
        made.append(inner.schedule)
        attribute = "tiles" if isinstance(inner.schedule, TensorSchedule) else "tile_scheduler_metadata"
        assert getattr(inner.schedule, attribute) is None
        layer_of(group, problem)(problem.query, problem.key, problem.value, problem.kv_cache.clone(), metadata)
        assert getattr(inner.schedule, attribute) is not None
        # What kernels read stays where the batch has it.
        assert inner.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert made[0] is not made[1]


def test_output_is_written_in_place_where_the_build_can(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    inner = flashmla_emulated._written

    def spy(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        seen.append(out is not None)
        return inner(result, out)

    monkeypatch.setattr(flashmla_emulated, "_written", spy)
    emulate("vllm")
    group = group_of(layer_config(num_speculative_tokens=1))
    check(group, [(2, 9), (2, 70)])
    check(group, [(1, 9), (2, 70)])
    assert seen == [True, False]


def test_a_kernel_that_takes_no_output_returns_its_own(emulate: Emulate) -> None:
    """A copy less; a layer in float16 wants another dtype than FP8's kernel writes."""
    emulate("vllm")
    for dtype, copied in ((torch.bfloat16, False), (torch.float16, True)):
        name = str(dtype).removeprefix("torch.")
        group = group_of(layer_config(dtype=name, kv_cache_dtype="fp8_e4m3"))
        problem = problem_for(group, DECODES)
        layer, output = layer_of(group, problem), torch.full((4, 4, 512), torch.nan, dtype=dtype)
        metadata = group.build(common_of(problem)).parts[0].metadata
        query, cache = problem.absorbed.to(dtype), problem.written_cache()
        found = layer.impls["decode"].forward_mqa(query, cache, metadata, Outputs(output))
        assert (found is output) == copied
        assert (found.shape, found.dtype) == (output.shape, dtype)
        assert not found.isnan().any()


@pytest.mark.parametrize("requests", [DECODES, [(1, 9), (2, 70)]], ids=["equal queries", "other lengths"])
def test_an_fp8_kernel_takes_the_query_in_two_parts(requests: list[tuple[int, int]], emulate: Emulate) -> None:
    """They are joined as they are quantised, wherever they lie."""
    emulate("vllm")
    group = group_of(layer_config(kv_cache_dtype="fp8_e4m3", num_speculative_tokens=1))
    problem = problem_for(group, requests)
    layer, query = layer_of(group, problem), problem.absorbed.to(torch.bfloat16)
    impl, cache = layer.impls["decode"], problem.written_cache()
    metadata = group.build(common_of(problem)).parts[0].metadata
    assert impl.takes_query_parts
    found = []
    for given in (query, query.split((512, 64), dim=-1)):
        output = torch.full((len(query), 4, 512), torch.nan, dtype=torch.bfloat16)
        found.append(impl.forward_mqa(given, cache, metadata, Outputs(output)))
    assert torch.equal(*found)
    assert not found[0].isnan().any()
    assert not layer_of(group_of(layer_config()), problem).impls["decode"].takes_query_parts


def test_an_output_with_strides(emulate: Emulate) -> None:
    emulate("vllm")
    group = group_of(layer_config())
    problem = problem_for(group, DECODES)
    cache = problem.written_cache()
    impl = layer_of(group, problem).impls["decode"]
    metadata = group.build(common_of(problem)).parts[0].metadata
    query = problem.absorbed.to(torch.bfloat16)
    plain, strided = torch.empty(4, 4, 512, dtype=torch.bfloat16), torch.empty(4, 512, 4, dtype=torch.bfloat16)
    assert impl.forward_mqa(query, cache, metadata, Outputs(plain)) is plain
    assert torch.equal(impl.forward_mqa(query, cache, metadata, Outputs(strided.transpose(1, 2))), plain)


def test_upstream_from_before_schedule_objects_is_refused(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "flash_mla.flash_mla_interface"
    old = flashmla_emulated.MODULES["sgl-kernel"]["sgl_kernel.flash_mla"]["get_mla_metadata"]
    functions = {**flashmla_emulated.MODULES["flash-mla"][name], "get_mla_metadata": old}
    monkeypatch.setitem(flashmla_emulated.MODULES["flash-mla"], name, functions)
    emulate("flash-mla")
    with pytest.raises(KernelMismatchError, match=r"get_mla_metadata.* requires cache_seqlens, .*does not pass"):
        group_of(layer_config(), "flash-mla")
