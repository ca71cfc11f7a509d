"""PAGED_ATTENTION's layer: how it is selected, which version runs a batch, what is reserved, graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select import AttentionConfig, Environment, select
from attn_select.layer.layouts import PAGED_ATTENTION as LAYOUT
from attn_select.machine.device import lookup
from attn_select.reference.oracle_paged import paged_reference
from attn_select.runtime import Attention, BlockTable, Capacity, attention_group, prepare_batch
from attn_select.runtime.cuda_graph import CudaGraphRunner
from attn_select.runtime.metadata import BatchError
from attn_select.testing import relative_error
from attn_select.testing.toolkit import EmulatedSelection
from attn_select_triton.facts.paged_attention import DECODE, PAGED_ATTENTION, partial_bytes
from attn_select_triton.facts.planned_kernels import PrefillKernel
from attn_select_triton.runtime import paged_attention as paged_runtime

ASSUMED = Environment(assume_installed=True)
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def config_of(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float16", **fields})


def group_of(config: AttentionConfig, capacity: Capacity, device: str = "cpu", **options: Any) -> Any:
    """Return a group of the backend for an H100, whose kernels run in the interpreter where there is none."""
    selection = select(config, None if device == "cuda" else "h100", backend="PAGED_ATTENTION")
    return attention_group(EmulatedSelection.of(selection), device, capacity, **options)


def step_of(group: Any, query_lens: Sequence[int], seq_lens: Sequence[int]) -> tuple[Any, torch.Tensor]:
    """Return a batch whose requests lie in blocks in random order, and a cache of random numbers."""
    size = group.block_size
    draw = torch.Generator().manual_seed(sum(seq_lens))
    width = -(-group.capacity.max_model_len // size)
    table = BlockTable(len(seq_lens), width, size, group.device)
    needed = [-(-length // size) for length in seq_lens]
    blocks = torch.randperm(sum(needed) + 1, generator=draw).tolist()
    for row, count in enumerate(needed):
        table.set_row(row, [blocks.pop() for _ in range(count)])
    cache = group.allocate_kv_cache(sum(needed) + 1)
    cache.copy_(torch.randn(cache.shape, generator=draw))
    return prepare_batch(query_lens, seq_lens, table), cache


def check(group: Any, common: Any, cache: torch.Tensor, *, new: bool = True) -> Any:
    """Run one layer on poisoned outputs and compare it with the oracle; return the step's metadata."""
    config = group.config
    torch.manual_seed(1)
    tokens, dtype = common.num_actual_tokens, getattr(torch, config.dtype)
    made = [
        torch.randn(tokens + 2, heads, config.head_size).to(group.device, dtype)
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    query, key, value = made if new else (made[0], None, None)
    output = torch.full_like(made[0], torch.nan)
    metadata = group.build(common)
    layer = Attention(group, caller_writes=True)
    layer.forward(query, key, value, cache, metadata, output)
    wanted, _ = paged_reference(
        made[0][:tokens], cache, LAYOUT, common.block_table_tensor, common.query_start_loc, common.seq_lens, config,
        layer.terms.scale,
    )  # fmt: skip
    assert relative_error(output[:tokens], wanted).row < 4e-3
    assert output[tokens:].isnan().all()
    return metadata.parts[0].metadata


def tokens_of(metadata: Any) -> list[int]:
    """Return the tokens of each launch of a prefill."""
    return [prefill.arguments["num_tokens"] for prefill in metadata.prefills]


# --- Versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_seqs", "num_heads", "max_seq_len", "version"),
    [
        (1, 1, 1, "v1"),
        (1, 1, 512, "v1"),
        (1, 1, 513, "v2"),
        (16, 32, 513, "v2"),
        (17, 32, 513, "v1"),
        (17, 32, 8192, "v1"),
        (17, 32, 8193, "v2"),
        (1, 513, 8192, "v1"),
        (4096, 128, 8193, "v2"),
    ],
)
def test_the_published_choice(num_seqs: int, num_heads: int, max_seq_len: int, version: str) -> None:
    assert DECODE.version(num_seqs, num_heads, max_seq_len) == version


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("seq_lens", "version"), [([512, 3], "v1"), ([513, 0, 3], "v2"), ([600, 20, 1], "v2"), ([20] * 129 + [600], "v1")]
)
def test_a_batch_of_decodes_runs_in_its_version(seq_lens: list[int], version: str, device: str) -> None:
    group = group_of(config_of(), Capacity(256, 256, 1024), device)
    if len(seq_lens) > 100 and device == "cpu":
        common, _ = step_of(group, [1] * len(seq_lens), seq_lens)
        assert group.build(common).parts[0].metadata.version == version
        return
    assert check(group, *step_of(group, [min(1, length) for length in seq_lens], seq_lens)).version == version


@pytest.mark.parametrize("device", DEVICES)
def test_decodes_alone_choose_the_version_of_a_mixed_batch(device: str) -> None:
    group = group_of(config_of(), Capacity(8, 2048, 1024), device)
    metadata = check(group, *step_of(group, [1, 1, 5, 60], [40, 17, 30, 540]))
    assert (metadata.version, tokens_of(metadata)) == ("v1", [65])
    metadata = check(group, *step_of(group, [1, 1, 5], [540, 17, 30]))
    assert (metadata.version, tokens_of(metadata)) == ("v2", [5])
    metadata = check(group, *step_of(group, [5], [30]))
    assert (metadata.version, tokens_of(metadata)) == (None, [5])


def test_decodes_come_first() -> None:
    group = group_of(config_of(), Capacity(8, 64, 256))
    assert group.reorder_batch_threshold == 1
    common, _ = step_of(group, [4, 1], [30, 9])
    with pytest.raises(BatchError, match=r"request 1 .* is a decode behind request 0"):
        group.build(common)


# --- Prefill ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("fields", "query_lens", "seq_lens", "new", "read"),
    [
        ({}, [7, 20], [7, 20], True, ["own"]),
        ({}, [1, 7, 20], [30, 7, 20], True, ["own"]),
        ({}, [7, 20], [7, 20], False, ["cache"]),
        ({}, [7, 20], [7, 21], True, ["cache"]),
        ({"kv_cache_dtype": "bfloat16"}, [7, 20], [7, 20], True, ["cache"]),
        ({}, [1, 70, 90], [30, 100, 90], True, ["copy"]),
        ({}, [70, 70, 90], [100, 90, 130], True, ["copy", "copy"]),
        ({}, [70, 90], [100, 300], True, ["copy", "cache"]),
    ],
    ids=["prompts", "decode and prompts", "nothing new", "few rows", "another dtype", "copied", "chunks", "too long"],
)
def test_what_prefills_read(
    fields: dict[str, Any],
    query_lens: list[int],
    seq_lens: list[int],
    new: bool,
    read: list[str],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step's own keys, or copies of those in the cache where enough rows attend to each, or the cache."""
    seen = []
    run = paged_runtime.prefill_attention

    def noted(*arguments: Any, **named: Any) -> None:
        seen.append("cache" if named["block_table"] is not None else "copy" if "clean" in named else "own")
        run(*arguments, **named)

    monkeypatch.setattr(paged_runtime, "prefill_attention", noted)
    monkeypatch.setattr(paged_runtime, "COPY_ROWS", 50)
    group = group_of(config_of(**fields), Capacity(8, 512, 512), device)
    rows = torch.full((2, 256, 2, 32), torch.nan, dtype=torch.float16, device=group.device)
    group.distinct[0].builder.gathered = tuple(rows)
    check(group, *step_of(group, query_lens, seq_lens), new=new)
    assert seen == read


def test_what_is_reserved_for_copies() -> None:
    plan = plan_of(config_of(), "h100", gather_workspace_mib=3)
    assert (plan.kernel, plan.workspace_bytes) == (PrefillKernel(gather_bytes=3 << 20), 3 << 20)
    for fields, longest, rows in (({}, 500, 8 * 512), ({"num_kv_heads": 4, "head_size": 256}, 2**20, 768)):
        context = group_of(config_of(**fields), Capacity(8, 512, longest)).distinct[0].context
        reserved = paged_runtime.room_for_copies(context, plan.workspace_bytes)
        assert reserved is not None
        assert reserved[0].shape == (rows, context.config.num_kv_heads, context.config.head_size)


# --- What is reserved, and graphs -------------------------------------------------------------------------------------


def plan_of(config: AttentionConfig, gpu: str, **options: Any) -> Any:
    """Return the prefill's plan."""
    made = PAGED_ATTENTION.options(**options)
    return PAGED_ATTENTION.plan(config, lookup(gpu), ASSUMED, made, "prefill")


def reserved(config: AttentionConfig, capacity: Capacity) -> int:
    """Return for how many partial results the builder has room."""
    partials = group_of(config, capacity).distinct[0].builder.partials
    if partials is None:
        return 0
    rows = len(partials.maxima)
    assert partials.outputs.shape == (rows, config.head_size)
    assert sum(part.nbytes for part in (partials.outputs, partials.maxima, partials.sums)) == rows * partial_bytes(
        config
    )
    return rows


@pytest.mark.parametrize(
    ("heads", "capacity", "sequences"),
    [
        (4, Capacity(16, 64, 512), 0),
        (4, Capacity(16, 64, 513), 16),
        (4, Capacity(200, 256, 8192), 128),
        (514, Capacity(200, 256, 8192), 0),
        (4, Capacity(200, 256, 8193), 200),
    ],
)
def test_partial_results_are_reserved_for_what_version_2_may_run(
    heads: int, capacity: Capacity, sequences: int
) -> None:
    rows = sequences * heads * -(-capacity.max_model_len // DECODE.partition_size)
    assert reserved(config_of(num_heads=heads), capacity) == rows


def test_wherever_version_2_runs_there_is_room_for_a_sequence() -> None:
    for heads, most, longest in itertools.product((2, 32, 512, 514), (1, 3, 600), (512, 513, 8192, 8193, 40000)):
        rows = reserved(config_of(num_heads=heads), Capacity(most, 600, longest))
        for count, length in itertools.product({1, most}, {1, 513, longest}):
            if length <= longest and DECODE.version(count, heads, length) == "v2":
                assert rows >= heads * -(-length // DECODE.partition_size)


def test_partial_results_are_bounded() -> None:
    config = config_of(num_heads=32, head_size=128)
    each = 32 * 256
    rows = reserved(config, Capacity(256, 256, 131072))
    assert rows == DECODE.partials_bytes // partial_bytes(config) < 256 * each
    longest = 2**24
    assert reserved(config, Capacity(4, 256, longest)) == 32 * longest // DECODE.partition_size


def test_a_bound_above_the_models_length_is_taken_for_it() -> None:
    group = group_of(config_of(), Capacity(4, 64, 1024))
    common, _ = step_of(group, [1], [600])
    common.max_seq_len = 10**6
    metadata = group.build(common).parts[0].metadata
    assert (metadata.version, metadata.decode["max_seq_len"]) == ("v2", 1024)


def test_a_captured_mixed_batch_is_left_to_prefill() -> None:
    group = group_of(config_of(), Capacity(4, 64, 256))
    common, _ = step_of(group, [1, 1, 5], [20, 30, 8])
    metadata = group.build_for_cudagraph_capture(common).parts[0].metadata
    assert (metadata.version, tokens_of(metadata), metadata.prompts) == (None, [7], None)
    common, _ = step_of(group, [1, 1], [20, 30])
    assert group.build_for_cudagraph_capture(common).parts[0].metadata.version == "v1"


def test_padding_behind_prefills_is_no_decode() -> None:
    group = group_of(config_of(), Capacity(8, 64, 256))
    common, cache = step_of(group, [1, 5, 0, 0], [20, 9, 0, 0])
    assert tokens_of(check(group, common, cache)) == [5]
    common, _ = step_of(group, [0, 0], [0, 0])
    common.max_query_len = 8  # a bound
    assert group.build(common).parts == ()


@pytest.mark.gpu
def test_build_waits_for_nothing() -> None:
    group = group_of(config_of(), Capacity(8, 1024, 1024), "cuda")
    batches = [step_of(group, *lens)[0] for lens in (([1, 1], [600, 3]), ([1, 5, 9], [40, 5, 30]))]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        versions = [group.build(common).parts[0].metadata.version for common in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert versions == ["v2", "v1"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("max_model_len", "num_seqs", "version"), [(512, 4, "v1"), (4096, 130, "v1"), (4096, 4, "v2"), (20000, 130, "v2")]
)
def test_a_graph_keeps_its_version_and_takes_other_lengths(max_model_len: int, num_seqs: int, version: str) -> None:
    """Capture at the model's longest, then replay batches that would choose the other version by themselves."""
    capacity = Capacity(num_seqs, 512, max_model_len)
    group = group_of(config_of(), capacity, "cuda", cuda_graphs=True)
    captured: list[str] = []
    lengths = [[min(max_model_len, length) for length in lens] for lens in ((3, 511, 1, 64), (700, 5000, 513), (5000,))]
    steps = [step_of(group, [1] * len(lens), lens) for lens in lengths]
    caches = [cache for _, cache in steps]
    static = torch.zeros_like(max(caches, key=torch.Tensor.numel))
    layer = Attention(group, caller_writes=True)
    query = torch.randn(4, 4, 32, device="cuda", dtype=torch.float16)

    def step(inputs: Any, metadata: Any) -> torch.Tensor:
        captured.append(metadata[group].parts[0].metadata.version)
        output = torch.full_like(inputs["query"], torch.nan)
        return layer.forward(inputs["query"], None, None, static, metadata[group], output)

    runner = CudaGraphRunner(step, [group], {"query": query}, [num_seqs])
    runner.capture()
    assert set(captured) == {version}
    for common, cache in steps:
        static[:, : cache.shape[1]].copy_(cache)
        rows = query[: common.num_reqs]
        output = runner({"query": rows}, {group: common})
        wanted, _ = paged_reference(
            rows, cache, LAYOUT, common.block_table_tensor, common.query_start_loc, common.seq_lens, group.config,
            layer.terms.scale,
        )  # fmt: skip
        assert relative_error(output, wanted).row < 4e-3
