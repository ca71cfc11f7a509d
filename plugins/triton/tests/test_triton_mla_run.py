"""TRITON_MLA's builder and layer: what they reserve, hand to the kernels and leave alone; results by the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attn_select.reference.running import impl_of
from attn_select.runtime import Outputs

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton_mla_layers import (  # noqa: E402
    DEEPSEEK,
    DEVICE,
    DTYPE,
    ON_GPU,
    WITHOUT_GLUON,
    batch,
    close,
    decode,
    expected,
    group_of,
    layer_config,
    parts_of,
    queries,
)

from attn_select.errors import KernelMismatchError  # noqa: E402
from attn_select.runtime import BatchError, Capacity, MLAAttention, VarlenMetadata, attention_group  # noqa: E402
from attn_select.testing import attention_reference, merge_reference, relative_error, selection_of  # noqa: E402
from attn_select_triton.facts.planned_kernels import MLADecodeKernel  # noqa: E402
from attn_select_triton.facts.triton_mla import TRITON_MLA  # noqa: E402
from attn_select_triton.kernels.mla_decode import mla_num_splits, mla_workspace  # noqa: E402
from attn_select_triton.runtime import triton_mla  # noqa: E402
from attn_select_triton.runtime.schedule import fixed_split, latent_keys, latent_pieces  # noqa: E402


@pytest.fixture(autouse=True)
def several_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter counts as one multiprocessor, for which no keys are split."""
    torch.set_num_threads(1)
    if not ON_GPU:
        monkeypatch.setattr(triton_mla, "sm_count", lambda device: 24)


@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_decode_takes_the_allocators_blocks_as_they_are(block_size: int) -> None:
    group = group_of(layer_config(block_size=block_size))
    assert group.kernel_block_size == group.backends["decode"].context.block_size == block_size
    lengths = [1, 15, 16, 63, 64, 65, 128, 130]
    common, cache, latents = batch(group, [1] * 8, lengths)
    query = queries(group, 8)
    found = decode(group, common, cache, query, padding=2)
    close(found, expected(group, common, query, latents))
    assert found[0][8:].isnan().all()
    assert found[1][8:].isnan().all()


@pytest.mark.parametrize("causal", [True, False])
def test_several_query_tokens_and_requests_without_keys(causal: bool) -> None:
    group = group_of(layer_config(num_speculative_tokens=3, num_heads=7, non_causal=not causal))
    common, cache, latents = batch(group, [4, 1, 3, 2], [130, 0, 3, 64])
    query = queries(group, 10)
    found = decode(group, common, cache, query)
    close(found, expected(group, common, query, latents, causal=causal))
    assert not found[0][4].any()
    assert found[1][4].isneginf().all()


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow(guard="seed 0")) for seed in (1, 2))])
def test_lengths_on_the_host_may_be_bounds(seed: int, fields: dict[str, Any], cuda_graphs: bool) -> None:
    """As an engine knows them that speculates: with every draft of the steps before accepted."""
    config = layer_config(num_speculative_tokens=3, **fields)
    group = group_of(config, Capacity(8, 256, 1024), cuda_graphs=cuda_graphs)
    assert parts_of(group)[0].takes_length_bounds
    draw = torch.Generator().manual_seed(seed)
    seq_lens = [(4, 9, 60, 300, 900)[int(i)] for i in torch.randint(5, (4,), generator=draw)]
    common, cache, latents = batch(group, [4] * 4, seq_lens, seed)
    common.seq_lens_cpu = common.seq_lens_cpu + torch.randint(5, (4,), generator=draw, dtype=torch.int32)
    query = queries(group, 16)
    close(decode(group, common, cache, query), expected(group, common, query, latents))


def test_a_step_may_attend_in_both_directions() -> None:
    group = group_of(layer_config(num_speculative_tokens=3))
    common, cache, latents = batch(group, [4, 4], [70, 5])
    common.causal = False
    query = queries(group, 8)
    close(decode(group, common, cache, query), expected(group, common, query, latents, causal=False))


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
def test_a_query_in_two_parts(cache_dtype: str) -> None:
    """The rope part lies behind what is not rotated, in padded rows; the bits are those of the query in one."""
    group = group_of(layer_config(num_speculative_tokens=3, kv_cache_dtype=cache_dtype))
    common, cache, _ = batch(group, [4, 1], [130, 70])
    query, (builder, impl) = queries(group, 5), parts_of(group)
    wanted, wanted_lse = decode(group, common, cache, query)
    rank = group.config.kv_lora_rank
    latent, rope = query.new_full((6, *query.shape[1:-1], rank), torch.nan), query.new_full((6, 3, 40), torch.nan)
    latent[:5], rope = query[..., :rank], torch.cat([rope, query.new_full((6, 3, query.shape[2] - rank), torch.nan)], 2)
    rope[:5, :, 40:] = query[..., rank:]
    output, lse = query.new_full((6, 3, rank), torch.nan), torch.full((6, 3), torch.nan, device=DEVICE)
    assert impl.takes_query_parts
    impl.forward_mqa((latent, rope[..., 40:]), cache, builder.build(0, common), Outputs(output, lse))
    assert torch.equal(output[:5].cpu(), wanted)
    assert torch.equal(lse[:5].cpu(), wanted_lse)
    assert output[5].isnan().all()


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_caches_by_the_layers_scale(cache_dtype: str) -> None:
    group = group_of(layer_config(kv_cache_dtype=cache_dtype))
    common, cache, latents = batch(group, [1, 1], [70, 5])
    query = queries(group, 2)
    close(decode(group, common, cache, query, 0.25), expected(group, common, query, latents, scale=0.25))


def test_log_sum_exp_of_any_strides() -> None:
    group = group_of(layer_config())
    common, cache, latents = batch(group, [1, 1], [70, 5])
    query, (builder, impl) = queries(group, 2), parts_of(group)
    output, by_head = query.new_empty(2, 3, 32), torch.full((3, 4), torch.nan, device=DEVICE)
    impl.forward_mqa(query, cache, builder.build(0, common), Outputs(output, by_head.t()))
    close((output.cpu(), by_head.t().cpu()), expected(group, common, query, latents))
    assert by_head[:, 2:].isnan().all()


def test_ranks_of_context_parallelism_merge_by_log_sum_exp() -> None:
    """Two ranks hold every other token each; the second has none of the shortest request's."""
    group = group_of(layer_config(decode_context_parallel_size=2))
    whole, _, latents = batch(group, [1, 1, 1], [131, 16, 1])
    query, found = queries(group, 3), []
    for rank in range(2):
        own = [latent[rank::2] for latent in latents]
        common, cache, _ = batch(group, [1, 1, 1], [len(latent) for latent in own], given=own)
        found.append(decode(group, common, cache, query))
    (first, first_lse), (second, second_lse) = found
    assert second_lse[2].isneginf().all()
    merged = merge_reference([first.double(), second.double()], [first_lse.double(), second_lse.double()])
    close(merged, expected(group, whole, query, latents))


def test_keys_are_split_within_what_was_reserved() -> None:
    group = group_of(layer_config(num_heads=16), Capacity(64, 64, 1 << 17))
    builder, _ = parts_of(group)
    room = builder.build(0, batch(group, [1], [5])[0]).arguments["workspace"]
    assert room.numel() * 4 == group.backends["decode"].context.plans["decode"].workspace_bytes
    for requests, longest in ((1, 64), (1, 65), (1, 1 << 17), (3, 5000), (64, 1 << 17)):
        common = batch(group, [1] * requests, [1] * requests)[0]
        common.max_seq_len, common.seq_lens_cpu = longest, torch.full_like(common.seq_lens_cpu, longest)
        arguments = builder.build(0, common).arguments
        assert arguments["workspace"] is room
        pieces = len(arguments["pieces"]) - arguments["merges"] if "pieces" in arguments else requests
        assert pieces == requests or pieces * mla_workspace(1, 16, 32) <= room.numel()
        assert (pieces > requests) == (longest > 1000 and (requests < 64 or ON_GPU))


def cut(lens: list[int], keys: int) -> list[int]:
    """Return how many pieces each request has."""
    return [max(1, -(-length // keys)) for length in lens]


def test_unequal_requests_are_cut_into_fair_pieces() -> None:
    """Four requests of 16384 tokens among sixteen of 512, two row tiles each, on 132 multiprocessors."""
    lens = [16384] * 4 + [512] * 16
    pieces = cut(lens, latent_keys(np.array(lens), 2, 264, 132))
    assert pieces[0] >= 12
    assert pieces[4:] == [1] * 16
    assert 2 * sum(pieces) <= 132 + 32


@pytest.mark.parametrize(
    ("lens", "units"),
    [
        ([248520] * 3 + [1611] * 194, 1),
        ([90715] * 12 + [14616] * 291, 1),
        ([209436] + [496] * 26, 1),
        ([181211] + [494] * 11, 8),
        ([12739] * 11 + [242] * 439, 1),
    ],
    ids=lambda given: "",
)
def test_long_requests_among_many_short_ones_are_cut(lens: list[int], units: int) -> None:
    """No piece takes longer than 1.6 times what every multiprocessor has of all keys; before, up to 15 times."""
    slots = 4 * 132 // units
    pieces = cut(lens, latent_keys(np.array(lens), units, slots, 132))
    assert max(map(lambda length, own: length / own, lens, pieces)) < 1.6 * max(sum(lens) * units / 132, 2000)
    assert sum(own for own in pieces if own > 1) <= slots
    assert sum(pieces) <= len(lens) + latent_pieces(units, 132)


@pytest.mark.parametrize("fields", [{}, {"num_heads": 40}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_requests_of_many_lengths_are_decoded_in_pieces(fields: dict[str, Any]) -> None:
    """Slots of the workspace that no piece fills hold NaN before."""
    group = group_of(layer_config(**{"num_heads": 16, "num_speculative_tokens": 1, **fields}), Capacity(8, 64, 2048))
    builder, _ = parts_of(group)
    builder._sms = 40
    common, cache, latents = batch(group, [1, 2, 1, 2, 0], [1400, 20, 1, 900, 5])
    query = queries(group, 6)
    builder._workspace.fill_(torch.nan)
    pieces, merges = (builder.build(0, common).arguments[name] for name in ("pieces", "merges"))
    assert merges == 2
    assert pieces[-2:, 0].tolist() == [0, 3]
    assert pieces[-3, 0] == -1  # of the request without a query
    assert pieces[:-3, 0].bincount().tolist() == [pieces[-2, 2], 1, 1, pieces[-1, 2]]
    close(decode(group, common, cache, query), expected(group, common, query, latents))


@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_two_long_requests_among_many_short_ones(cuda_graphs: bool, fields: dict[str, Any]) -> None:
    """Of drafts too, and beside requests without keys or queries; the workspace holds NaN before."""
    config = layer_config(num_speculative_tokens=2, **fields)
    group = group_of(config, Capacity(32, 96, 3000), cuda_graphs=cuda_graphs)
    builder, _ = parts_of(group)
    common, cache, latents = batch(group, [3, 1, *[1, 2] * 12, 0, 1], [2900, 1500, *[5, 70] * 12, 9, 0])
    query = queries(group, common.num_actual_tokens)
    builder._workspace.fill_(torch.nan)
    arguments = builder.build(0, common).arguments
    found = arguments["pieces"][: len(arguments["pieces"]) - arguments["merges"]]
    counts = found[found[:, 0] >= 0, 0].bincount()
    assert counts[0] > 1
    assert counts[1] > 1
    assert (counts[2:26] == 1).all()
    close(decode(group, common, cache, query), expected(group, common, query, latents))


@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True}], ids=str)
def test_captured_steps_have_the_same_launches(fields: dict[str, Any]) -> None:
    """Whatever the lengths, everything is the same but what stands in tensors."""
    group = group_of(layer_config(num_heads=16, **fields), Capacity(4, 64, 1 << 16), cuda_graphs=True)
    builder, _ = parts_of(group)
    seen = []
    for lens in ([1 << 16] * 2, [700, 700], [1, 1], [1 << 16, 1]):
        common = batch(group, [1, 1], [1, 1])[0]
        common.max_seq_len, common.seq_lens_cpu = max(lens), torch.tensor(lens, dtype=torch.int32)
        arguments = builder.build(0, common).arguments
        pieces = arguments["pieces"]
        seen.append((arguments["merges"], len(pieces), pieces.data_ptr(), arguments["workspace"].data_ptr()))
    assert seen == seen[:1] * 4


def test_captured_pieces_are_those_of_the_replay() -> None:
    """A step that was even at capture is cut at replay, and the launches of the capture compute it."""
    group = group_of(layer_config(num_heads=16), Capacity(4, 64, 4096), cuda_graphs=True)
    builder, impl = parts_of(group)
    builder._sms = 24
    lengths = ([4096, 64], [700, 700], [1, 4000])
    first = batch(group, [1, 1], [1, 1])[0]
    captured = builder.build(0, first)
    pieces = captured.arguments["pieces"][: -captured.arguments["merges"]]
    for seed, lens in enumerate(lengths):
        common, cache, latents = batch(group, [1, 1], lens, seed)
        builder.build(0, common)
        found = pieces[pieces[:, 0] >= 0]
        assert found[:, 0].bincount().tolist() == [int(found[found[:, 0] == i, 2][0]) for i in (0, 1)]
        assert found[0, 6] == max(lens)
        assert found[0, 2] > 1
        builder._workspace.fill_(torch.nan)
        replayed = captured.arguments | {"seq_lens": common.seq_lens, "block_table": common.block_table_tensor}
        query = queries(group, 2)
        output, lse = query.new_full((2, 16, 32), torch.nan), torch.full((2, 16), torch.nan, device=DEVICE)
        impl.forward_mqa(query, cache, triton_mla.MLACall(2, replayed), Outputs(output, lse))
        close((output.cpu(), lse.cpu()), expected(group, common, query, latents))


@pytest.mark.parametrize(("requests", "longest"), [(64, 4096), (1, 32768), (20, 2000)])
def test_equal_requests_have_the_splits_that_suit_all(requests: int, longest: int) -> None:
    keys = latent_keys(np.full(requests, longest), 2, 264, 132)
    assert keys % 64 == 0
    assert -(-longest // keys) == mla_num_splits(2 * requests, longest, 132)


def test_splits_of_batch_invariant_layers_are_fixed_and_reserved_for_the_longest() -> None:
    assert [fixed_split(length, 1024, 64) for length in (1, 16384, 131072, 131073)] == [1024, 1024, 8192, 8256]
    group = group_of(layer_config(batch_invariant=True), Capacity(4, 64, 5000))
    builder, _ = parts_of(group)
    common = batch(group, [1, 1], [5, 70])[0]
    arguments = builder.build(0, common).arguments
    assert arguments["merges"] == 0
    assert arguments["workspace"].numel() == 4 * 5 * 3 * 33
    common.seq_lens_cpu = torch.tensor([5000, 1024], dtype=torch.int32)
    arguments = builder.build(0, common).arguments
    assert (arguments["merges"], len(arguments["pieces"])) == (1, 5 + 1 + 1)
    common.seq_lens_cpu = torch.tensor([1 << 20, 5], dtype=torch.int32)
    with pytest.raises(BatchError, match=r"up to 1048576 of one.*max_model_len = 5000"):
        builder.build(0, common)


def test_same_bits_beside_any_other_request() -> None:
    lengths = [70, 1100, 1, 2049]
    group = group_of(layer_config(batch_invariant=True, num_speculative_tokens=1), Capacity(4, 64, 2100))
    common, cache, _ = batch(group, [1, 2, 1, 1], lengths)
    query = queries(group, 5)
    output, lse = decode(group, common, cache, query)
    for request in range(4):
        rows = slice(*common.query_start_loc_cpu[request : request + 2].tolist())
        alone, alone_lse = decode(group, common.requests(request, request + 1), cache, query[rows])
        assert torch.equal(alone, output[rows])
        assert torch.equal(alone_lse, lse[rows])


def test_builds_nothing_that_moves() -> None:
    group = group_of(layer_config(), cuda_graphs=True)
    builder, _ = parts_of(group)
    common = batch(group, [1, 1], [70, 5])[0]
    arguments = builder.build_for_cudagraph_capture(common).arguments
    for name, tensor in (
        ("query_start_loc", common.query_start_loc),
        ("seq_lens", common.seq_lens),
        ("block_table", common.block_table_tensor),
    ):
        assert arguments[name].data_ptr() == tensor.data_ptr()
    assert builder.cudagraph_support == "UNIFORM_BATCH"
    assert not builder.use_cascade_attention(4096, common)


def test_refuses_a_kernel_that_does_not_run_here() -> None:
    selection = selection_of(TRITON_MLA, layer_config(**DEEPSEEK), WITHOUT_GLUON if ON_GPU else "h100")
    assert selection.plans["decode"].kernel == MLADecodeKernel(gluon=not ON_GPU)
    if ON_GPU:
        attention_group(selection, "cuda", Capacity(8, 64, 512))
        return
    with pytest.raises(KernelMismatchError, match=r"decode kernel, written in Gluon for Hopper, does not run on cpu"):
        attention_group(selection, "cpu", Capacity(8, 64, 512))


def varlen(query_lens: list[int], key_lens: list[int], causal: bool) -> VarlenMetadata:
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, key_lens)]
    return VarlenMetadata(
        query_start_loc=starts[0].to(DEVICE),
        query_start_loc_cpu=starts[0],
        key_start_loc=starts[1].to(DEVICE),
        key_start_loc_cpu=starts[1],
        max_query_len=max(query_lens),
        max_key_len=max(key_lens),
        causal=causal,
        query_offsets_cpu=torch.tensor([0 if causal else k for k in key_lens], dtype=torch.int32),
        counts_sinks=causal,
    )


@pytest.mark.parametrize("sizes", [(48, 32), (40, 48), *[(192, 128), (256, 40), (40, 256), (128, 128)] * ON_GPU])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(
    ("query_lens", "key_lens", "causal"),
    [
        ([5, 1, 70], [5, 1, 70], True),
        ([5, 1, 9], [7, 0, 70], False),
        ([1, 0, 3], [64, 3, 0], False),
        ([2, 3], [0, 0], False),
    ],
    ids=["own tokens", "an empty context", "no query", "no context at all"],
)
def test_prefill(
    query_lens: list[int], key_lens: list[int], causal: bool, contiguous: bool, sizes: tuple[int, int]
) -> None:
    size, value_size = sizes
    group = group_of(layer_config(qk_nope_head_dim=size - 16, v_head_dim=value_size))
    served = group.backends["prefill"]
    impl = impl_of(served, scale=0.125)
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, DTYPE)
    tokens, keys = sum(query_lens), sum(key_lens)
    query = torch.randn(tokens + 2, 3, size, generator=draw).to(dtype).to(DEVICE)
    key = torch.randn(keys, 3, size, generator=draw).to(dtype).to(DEVICE)
    both = torch.randn(keys, 3, 16 + value_size, generator=draw).to(dtype).to(DEVICE)  # as kv_b_proj gives it
    value = both[..., 16:]
    output = torch.full((tokens + 2, 3, value_size), torch.nan, dtype=dtype, device=DEVICE)
    lse = torch.full((tokens + 2, 3) if contiguous else (3, tokens + 2), torch.nan, device=DEVICE)
    lse = lse if contiguous else lse.t()
    metadata = served.builder.build_prefill(varlen(query_lens, key_lens, causal))
    impl.forward_mha(query, key, value, metadata, Outputs(output, lse))
    assert output[tokens:].isnan().all()
    assert lse[tokens:].isnan().all()
    parts, q, k = [], 0, 0
    for query_len, key_len in zip(query_lens, key_lens, strict=True):
        rows, some = slice(q, q + query_len), slice(k, k + key_len)
        q, k = rows.stop, some.stop
        given = (query[rows].cpu(), key[some].cpu(), value[some].cpu())
        parts.append(attention_reference(*given, scale=0.125, causal=causal))
    wanted = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    close((output[:tokens].cpu(), lse[:tokens].cpu()), wanted)


def test_prefill_in_chunks_gives_what_one_pass_gives() -> None:
    """Through the layer: 90 cached tokens and 7 new ones by chunks of 32 and by one of 512."""
    outputs = []
    for workspace_tokens in (32, 512):
        group = group_of(layer_config(), workspace_tokens=workspace_tokens)
        common, cache, _ = batch(group, [7, 2], [97, 2])
        draw = torch.Generator().manual_seed(3)
        dtype = getattr(torch, DTYPE)
        weight, query, kv_c, k_pe = (
            torch.randn(shape, generator=draw).mul(factor).to(dtype).to(DEVICE)
            for shape, factor in (((3 * 64, 32), 0.2), ((9, 3, 48), 1.0), ((9, 32), 1.0), ((9, 16), 1.0))
        )
        layer = MLAAttention(group, weight)
        outputs.append(layer(query, kv_c, k_pe, cache, group.build(common)).cpu())
    assert relative_error(outputs[0], outputs[1].double()).row < (2e-2 if ON_GPU else 2e-3)


@pytest.mark.parametrize(
    ("rank", "rope"), [(16, 16), (48, 80), *[(272, 96), (512, 128), (496, 16), (256, 32)] * ON_GPU]
)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(("heads", "block_size"), [(5, 64), (20, 48)])
def test_latents_of_any_size(rank: int, rope: int, cache_dtype: str, heads: int, block_size: int) -> None:
    config = layer_config(
        num_heads=heads, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_cache_dtype=cache_dtype, block_size=block_size
    )
    group = group_of(config)
    common, cache, latents = batch(group, [1, 1], [70, 129])
    query = queries(group, 2)
    found = decode(group, common, cache, query, 0.5)
    close(found, expected(group, common, query, latents, scale=1.0 if cache_dtype == "auto" else 0.5))
