"""``TORCH_MLA`` at run time, where the conformance suite does not look: gathering, memory it must not read, paths."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_layers import check_close

from attn_select import AttentionConfig, select
from attn_select.reference.running import common_of
from attn_select.runtime import (
    BlockTable,
    CommonAttentionMetadata,
    MLAAttention,
    MLAAttentionGroup,
    Outputs,
    Scales,
    Terms,
    VarlenMetadata,
    prepare_batch,
)
from attn_select.testing import (
    Problem,
    attention_reference,
    error_bound,
    random_problem,
    same_bits,
)
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.runtime import mla_builder as mla_metadata
from attn_select_torch.runtime.mla import TorchMLABackend, TorchMLAImpl
from attn_select_torch.runtime.mla_builder import Gather

SMALL = {"num_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
pytestmark = pytest.mark.usefixtures("one_thread")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def make_group(config: AttentionConfig, device: str = "cpu", **options: Any) -> MLAAttentionGroup:
    return MLAAttentionGroup(select(config, device="cpu", backend="TORCH_MLA"), device, **options)


def run(
    problem: Problem, group: MLAAttentionGroup, common: CommonAttentionMetadata | None = None, *, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    assert problem.kv_cache is not None
    given: dict[str, Any] = problem.per_head
    if problem.k_scale is not None:
        given["scales"] = Scales.make(group.device, k=problem.k_scale)
    layer = MLAAttention(group, problem.kv_b_proj, **given)
    lse = torch.empty(problem.query.shape[:2], device=group.device) if wants_lse else None
    metadata = group.build(common or common_of(problem))
    cache = problem.kv_cache.clone()
    output = layer(problem.query, problem.key, problem.value, cache, metadata, output_lse=lse)
    return output, lse


def check(problem: Problem, group: MLAAttentionGroup, common: CommonAttentionMetadata | None = None) -> None:
    """Compare both ways, with and without LSE, which may be different code, with the oracle."""
    expected, expected_lse = problem.reference()
    bound = error_bound(group.config, group.selection.plans)
    for wants_lse in (False, True):
        output, lse = run(problem, group, common, wants_lse=wants_lse)
        check_close(output, lse, expected, expected_lse, bound)


def gathers(group: MLAAttentionGroup, requests: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return the shape of each gather of a batch of decodes."""
    problem = random_problem(0, group.config, requests=requests)
    built: tuple[Gather, ...] = group.build(common_of(problem)).parts[0].metadata
    return [gather.shape for gather in built]


def test_load_returns_the_backend() -> None:
    backend = TORCH_MLA.get_class()
    assert backend is TorchMLABackend
    assert backend.impl_cls is TorchMLAImpl


def test_decodes_are_gathered_by_query_length_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(AttentionConfig(**SMALL, num_speculative_tokens=1))
    requests = [(1, 300), (1, 700), (2, 400), (1, 10), (1, 128), (1, 90), (2, 500), (1, 0)]
    assert gathers(group, requests) == [(2, 2, 500), (1, 1, 700), (1, 1, 300), (3, 1, 128), (1, 1, 0)]
    # 700 alone is over the limit: a single request may be.
    monkeypatch.setattr(mla_metadata, "GATHERED_TOKENS", 260)
    wanted = [(1, 2, 500), (1, 2, 400), (1, 1, 700), (1, 1, 300), (2, 1, 128), (1, 1, 10), (1, 1, 0)]
    assert gathers(group, requests) == wanted
    invariant = make_group(AttentionConfig(**SMALL, batch_invariant=True))
    assert gathers(invariant, [(1, 9), (1, 9), (1, 8)]) == [(1, 1, 9), (1, 1, 9), (1, 1, 8)]


def test_a_window_bounds_what_is_gathered() -> None:
    group = make_group(AttentionConfig(**SMALL, sliding_window=20, num_speculative_tokens=2))
    assert gathers(group, [(1, 700), (1, 5), (3, 700), (3, 4)]) == [(2, 3, 22), (2, 1, 20)]


@pytest.mark.parametrize("extras", [{}, {"sinks": True}, {"alibi": True}, {"logits_soft_cap": 2.0}])
@pytest.mark.parametrize("limit", [40, 100, 2**16])
def test_small_and_large_gathers_agree(
    extras: dict[str, Any], limit: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_metadata, "GATHERED_TOKENS", limit)
    config = AttentionConfig(**SMALL, **extras, num_speculative_tokens=2)
    requests = [(1, 30), (3, 31), (2, 2), (1, 1), (1, 0), (3, 90), (1, 64), (1, 88), (3, 3)]
    check(random_problem(1, config, requests=requests).to(device), make_group(config, device))


@pytest.mark.parametrize("extras", [{}, {"sliding_window": 9}, {"alibi": True}, {"sinks": True}, {"mm_prefix": True}])
def test_stale_tables_are_not_followed(extras: dict[str, Any], device: str) -> None:
    """Entries behind a request's last block, and of blocks that left the window, may be any number."""
    config = AttentionConfig(**SMALL, **extras, num_speculative_tokens=1)
    requests = [(1, 47), (2, 16), (1, 120), (1, 0), (7, 50), (16, 16), (3, 100)]
    problem = random_problem(2, config, requests=requests).to(device)
    table = problem.block_table
    assert table is not None
    stale, window = torch.full_like(table, 2**31 - 1), config.sliding_window
    stale[:, ::2] = -7
    for request, (query_len, seq_len) in enumerate(requests):
        first = 0 if window is None else max(0, seq_len - query_len - window + 1)
        used = slice(first // 16, -(-seq_len // 16))
        stale[request, used] = table[request, used]
    check(problem, make_group(config, device, workspace_tokens=33), common_of(problem, block_table_tensor=stale))


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"sliding_window": 40},
        {"sliding_window": 300, "non_causal": True},
        {"mm_prefix": True},
        {"mm_prefix": True, "sliding_window": 7, "alibi": True},
        {"logits_soft_cap": 4.0, "sinks": True},
    ],
)
def test_prefills_longer_than_a_part(extras: dict[str, Any], device: str) -> None:
    """600 rows are masked in three parts; without context, and with more of it than the workspace holds."""
    config = AttentionConfig(**SMALL, **extras)
    problem = random_problem(3, config, requests=[(600, 600), (300, 700)]).to(device)
    check(problem, make_group(config, device, workspace_tokens=128))


def test_values_wider_than_keys(device: str) -> None:
    config = AttentionConfig(
        num_heads=2, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=40, sliding_window=90
    )
    problem = random_problem(4, config, requests=[(1, 30), (70, 70), (50, 120)]).to(device)
    check(problem, make_group(config, device))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("counts_sinks", [None, False, True])
def test_rows_without_keys_in_prefill(causal: bool, counts_sinks: bool | None, device: str) -> None:
    """Output 0, LSE -inf; with sinks, where they are counted, the sink. Three requests: no key, no row, four rows."""
    config = AttentionConfig(**SMALL, sinks=counts_sinks is not None, dtype="float32")
    served = make_group(config, device).backends["prefill"]
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(*shape, generator=draw) for shape in ((7, 4, 24), (5, 4, 24), (5, 4, 24)))
    sinks = None if counts_sinks is None else torch.randn(4, generator=draw)
    bounds, key_bounds = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 3, 3, 7], [0, 0, 2, 5]))
    varlen = VarlenMetadata(
        query_start_loc=bounds.to(device),
        query_start_loc_cpu=bounds,
        key_start_loc=key_bounds.to(device),
        key_start_loc_cpu=key_bounds,
        max_query_len=4,
        max_key_len=3,
        causal=causal,
        query_offsets_cpu=torch.tensor([0, 2, -1], dtype=torch.int32),  # the last request's first row sees none
        counts_sinks=bool(counts_sinks),
    )
    impl = served.impl(Terms.of(config, served.context.device, scale=0.2, sinks=sinks))
    tensors = [tensor.to(device) for tensor in (query, key, value)]
    output, lse = torch.full((7, 4, 24), torch.nan, device=device), torch.full((7, 4), torch.nan, device=device)
    impl.forward_mha(*tensors, served.builder.build_prefill(varlen), Outputs(output, lse))
    assert (output[:3] == 0).all()
    expected = sinks.expand(3, 4) if sinks is not None and counts_sinks else torch.full((3, 4), -torch.inf)
    assert torch.equal(lse[:3].cpu(), expected)
    given = sinks if counts_sinks else None
    positions = torch.arange(-1, 3)
    wanted = attention_reference(
        query[3:], key[2:], value[2:], scale=0.2, causal=causal, sinks=given, query_positions=positions
    )
    torch.testing.assert_close((output[3:].cpu().double(), lse[3:].cpu().double()), wanted, rtol=1e-5, atol=1e-5)


def test_images_among_draft_tokens(device: str) -> None:
    """Each request's image makes other rows see ahead, so decodes of equal length and size differ."""
    config = AttentionConfig(**SMALL, mm_prefix=True, sliding_window=5, num_speculative_tokens=3)
    problem = random_problem(7, config, requests=[(4, 40), (4, 40), (4, 40)]).to(device)
    ranges = (((37, 39),), ((10, 38),), ())
    check(dataclasses.replace(problem, mm_prefix_ranges=ranges), make_group(config, device))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("workspace", [16, 8192])
def test_batch_invariance(dtype: str, workspace: int, device: str) -> None:
    """Each request alone gives the bits that it gives in a batch, projections and chunk borders included."""
    config = AttentionConfig(**SMALL, dtype=dtype, batch_invariant=True, num_speculative_tokens=1)
    requests = [(1, 30), (2, 31), (1, 90), (20, 20), (9, 60), (33, 50)]
    whole = random_problem(5, config, requests=requests).to(device)
    group = make_group(config, device, workspace_tokens=workspace)
    together = run(whole, group, wants_lse=True)
    for request in range(len(requests)):
        rows = whole.tokens_of(request, request + 1)
        for wants_lse in (False, True):
            output, lse = run(whole.part(request, request + 1), group, wants_lse=wants_lse)
            assert same_bits(output, together[0][rows])
            assert lse is None or together[1] is None or same_bits(lse, together[1][rows])


@pytest.mark.parametrize(
    ("extras", "wants_lse", "calls"),
    [({}, False, 2), ({"sliding_window": 8}, False, 2), ({"sinks": True}, False, 0), ({}, True, 0)],
)
def test_fused_where_it_serves(
    extras: dict[str, Any], wants_lse: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for the decodes, one for the prefill."""
    seen: list[tuple[int, ...]] = []
    fused = functional.scaled_dot_product_attention

    def counted(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        seen.append(tuple(query.shape))
        return fused(query, *arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    config = AttentionConfig(**SMALL, **extras)
    problem = random_problem(6, config, requests=[(1, 30), (1, 24), (9, 9)])
    run(problem, make_group(config), wants_lse=wants_lse)
    assert seen == [(2, 1, 4, 40), (1, 4, 9, 24)][:calls]


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu() -> None:
    """Neither ``build`` nor the layer reads anything back, with decodes, prefills and context in the batch."""
    config = AttentionConfig(**SMALL, num_speculative_tokens=1, kv_cache_dtype="fp8_e4m3")
    group, rng = make_group(config, "cuda", workspace_tokens=64), random.Random(0)
    requests = [(1, 30), (2, 50), (1, 300), (20, 20), (30, 200)]
    table, blocks = BlockTable(len(requests), 32, 16, "cuda"), rng.sample(range(100), 60)
    for row, (_, seq_len) in enumerate(requests):
        table.append_row(row, [blocks.pop() for _ in range(-(-seq_len // 16))])
    common = prepare_batch(*zip(*requests, strict=True), table)
    layer = MLAAttention(group, torch.randn(160, 32), scales=Scales.make("cuda", k=0.1))
    shapes = ((4, 24), (32,), (8,))
    tensors = [torch.randn(54, *shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    cache = group.allocate_kv_cache(100)
    layer(*tensors, cache, group.build(common))  # loads kernels, which waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = layer(*tensors, cache, group.build(common))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.isfinite().all()
