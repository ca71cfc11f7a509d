"""``TORCH_SDPA`` against the float64 oracle: how it cuts batches, gathers, masks and merges.

Bounds are those of the conformance suite (``attn_select.reference.comparison``, which states their reasons).
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from torch_layers import check_close, context_of

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_HND, FLASHINFER_NHD
from attn_select.reference.running import common_of
from attn_select.runtime import Outputs, Scales, Terms
from attn_select.testing import Problem, error_bound, random_problem
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA
from attn_select_torch.runtime import cudnn_prompts, varlen
from attn_select_torch.runtime import sdpa_builder as sdpa_build
from attn_select_torch.runtime.band_mask import BandMask
from attn_select_torch.runtime.dense_attention import attend, visible_keys
from attn_select_torch.runtime.gather import Buffers, CacheGather
from attn_select_torch.runtime.request_tiles import Limits, rounded
from attn_select_torch.runtime.sdpa import SDPAImpl
from attn_select_torch.runtime.sdpa_builder import SDPABuilder, SDPAMetadata

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32", "block_size": 4}
BATCH = ((1, 37), (20, 20), (1, 36), (5, 31), (3, 9), (1, 1), (3, 30), (17, 40), (1, 33))
"""Decodes of like and unlike lengths, prompts, a chunk, and two queries of the same length above one."""


class Rig:
    """One layer, its builder, and a problem whose cache holds the step's tokens."""

    def __init__(self, problem: Problem, limits: Limits | None = None) -> None:
        self.problem, config = problem, problem.config
        device = problem.query.device
        self.context = context_of(
            TORCH_SDPA,
            config,
            device,
            kv_layout=problem.layout,
            block_size=problem.block_size if config.has_cache else None,
            max_num_seqs=64,
            max_num_batched_tokens=4096,
            max_model_len=4096,
        )
        self.builder = SDPABuilder(self.context)
        if limits is not None:
            self.builder.limits = limits
        heads = config.num_kv_heads if config.per_head_quant_scales else 0
        k, v = (1.0 if scale is None else scale for scale in (problem.k_scale, problem.v_scale))
        given = {"scale": problem.scale, "alibi_slopes": problem.alibi_slopes, "sinks": problem.sinks}
        scales = Scales.make(device, k=k, v=v, num_kv_heads=heads)
        self.impl = SDPAImpl(self.context, Terms.of(config, device, scales=scales, **given))  # type: ignore[arg-type]
        self.cache = problem.written_cache() if config.has_cache else None

    def run(self, metadata: SDPAMetadata, *, reference: Rig | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and LSE; without an LSE to write, the output is the oracle's too."""
        query = self.problem.query
        tokens = len(query)
        output = query.new_full((tokens + 1, query.shape[1], self.context.config.value_head_size), torch.nan)
        lse = torch.full(output.shape[:2], torch.nan, device=query.device)
        keys = (None, None) if self.cache is not None else (self.problem.key, self.problem.value)
        self.impl.forward(query, *keys, self.cache, metadata, Outputs(output, lse))
        alone = torch.full_like(output, torch.nan)
        self.impl.forward(query, *keys, self.cache, metadata, Outputs(alone))
        assert output[tokens:].isnan().all(), "rows behind the step's tokens were written"
        (reference or self).check(alone[:tokens])
        return output[:tokens], lse[:tokens]

    def check(self, output: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        bound = error_bound(self.context.config, self.context.plans)
        expected, expected_lse = self.problem.reference(kv_cache=self.cache)
        check_close(output, lse, expected, expected_lse, bound)

    def check_all(self) -> SDPAMetadata:
        metadata = self.builder.build(0, common_of(self.problem))
        self.check(*self.run(metadata))
        return metadata


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "sinks": {"sinks": True, "sliding_window": 12},
    "alibi": {"alibi": True},
    "soft cap": {"logits_soft_cap": 3.0, "sinks": True},
    "images": {"mm_prefix": True},
    "images and window": {"mm_prefix": True, "sliding_window": 6, "alibi": True},
    "non causal": {"non_causal": True},
    "non causal window": {"non_causal": True, "sliding_window": 5},
    "one KV head": {"num_kv_heads": 1, "sinks": True},
    "as many KV heads": {"num_kv_heads": 4, "dtype": "bfloat16", "alibi": True},
    "narrow V": {"v_head_size": 8},
    "wide V": {"v_head_size": 24, "sliding_window": 9},
    "mixed cache": {"dtype": "bfloat16", "kv_cache_dtype": "float16"},
    "float16": {"dtype": "float16", "kv_cache_dtype": "bfloat16", "alibi": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_however_the_batch_is_cut(name: str) -> None:
    config = AttentionConfig(**(SMALL | VARIANTS[name]))
    problem = random_problem(1, config, FLASH_ATTN_NHD, requests=BATCH)
    pieces = set()
    for tile_rows, group_keys in ((64, 0), (64, 200), (3, 80), (1, 10**6)):
        metadata = Rig(problem, Limits(tile_rows, group_keys)).check_all()
        pieces.add(len(metadata.pieces))
    assert len(pieces) >= 3, "the limits changed nothing"


def test_long_prompts_and_contexts_with_the_limits_of_this_machine() -> None:
    for asked in ({}, {"sliding_window": 70}):
        config = AttentionConfig(**(SMALL | {"block_size": 16} | asked))
        requests = ((300, 300), (140, 700), (1, 900), (1, 800), (1, 1000))
        Rig(random_problem(3, config, FLASHINFER_NHD, requests=requests)).check_all()


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("asked", [{}, {"sliding_window": 6}, {"alibi": True}, {"v_head_size": 24}, {"v_head_size": 8}])
def test_encoders_take_the_steps_own_keys(attn_type: Any, asked: dict[str, Any]) -> None:
    config = AttentionConfig(**(SMALL | {"attn_type": attn_type} | asked))
    problem = random_problem(4, config, None, requests=((9, 9), (1, 1), (30, 30), (30, 30)))
    for limits in (None, Limits(4, 0)):
        Rig(problem, limits).check_all()


@pytest.mark.parametrize("asked", [{}, {"sliding_window": 5}, {"alibi": True, "sinks": True}])
def test_cross_attention_has_lengths_of_its_own(asked: dict[str, Any]) -> None:
    config = AttentionConfig(**(SMALL | {"attn_type": "encoder_decoder"} | asked))
    requests = ((1, 20), (30, 8), (4, 25), (1, 22), (12, 12), (2, 0))
    for limits in (None, Limits(4, 100)):
        Rig(random_problem(5, config, FLASH_ATTN_NHD, requests=requests), limits).check_all()


def test_a_step_may_see_both_ways() -> None:
    problem = random_problem(7, AttentionConfig(**SMALL), FLASH_ATTN_NHD, requests=BATCH)
    both = Rig(replace(problem, config=AttentionConfig(**(SMALL | {"non_causal": True}))))
    rig = Rig(problem)
    both.check(*rig.run(rig.builder.build(0, common_of(problem, causal=False)), reference=both))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cascade_gives_what_the_plain_path_gives(dtype: str) -> None:
    for asked in ({}, {"sinks": True}, {"logits_soft_cap": 4.0}):
        config = AttentionConfig(**(SMALL | {"dtype": dtype} | asked))
        problem = random_problem(8, config, FLASH_ATTN_NHD, requests=((1, 30), (4, 22), (1, 17), (9, 40)))
        assert problem.block_table is not None
        problem.block_table[1:, :2] = problem.block_table[:1, :2]  # the first eight tokens are everybody's
        rig = Rig(problem)
        # A request's own writes lie behind the prefix, and what the shared blocks hold is the first request's.
        rig.cache = problem.written_cache()
        metadata = rig.builder.build(8, common_of(problem))
        assert metadata.prefix is not None
        rig.check(*rig.run(metadata))


def test_blocks_outside_the_window_are_not_looked_up() -> None:
    config = AttentionConfig(**(SMALL | {"sliding_window": 6}))
    problem = random_problem(9, config, FLASH_ATTN_NHD, requests=((1, 37), (1, 39), (4, 30), (20, 33)))
    assert problem.block_table is not None
    for row, (query_len, seq_len) in zip(problem.block_table, problem.requests, strict=True):
        row[: max(0, seq_len - query_len - 5) // 4] = -1
        row[-(-seq_len // 4) :] = 10**6
    Rig(problem).check_all()


def test_a_cache_may_lie_in_memory_as_another_layout() -> None:
    for layout, axes in ((FLASH_ATTN_NHD, (0, 1)), (FLASHINFER_HND, (2, 3))):
        problem = random_problem(10, AttentionConfig(**(SMALL | {"v_head_size": 8})), layout, requests=BATCH)
        rig = Rig(problem)
        assert rig.cache is not None
        rig.cache = rig.cache.transpose(*axes).contiguous().transpose(*axes)
        rig.check_all()


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_fp8_number_is_read_as_it_is(cache_dtype: Any, dtype: torch.dtype) -> None:
    config = AttentionConfig(**(SMALL | {"kv_cache_dtype": cache_dtype, "num_kv_heads": 2, "head_size": 16}))
    stored = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[cache_dtype]
    codes = torch.arange(256).to(torch.uint8).view(1, 2, 4, 2, 16).transpose(0, 1).contiguous().view(stored)
    gather = CacheGather(config, FLASH_ATTN_NHD, 4, dtype)
    rows = gather.rows(torch.zeros(4, dtype=torch.int32), torch.tensor([3, 0, 2, 1]))
    keys, values = gather.read(codes, rows, 1, Buffers(torch.device("cpu")))
    for found, half in ((keys, codes[0, 0]), (values, codes[1, 0])):
        expected = half.float()[[3, 0, 2, 1]].transpose(0, 1)[None].to(dtype)
        assert torch.equal(found.nan_to_num(1234.0), expected.nan_to_num(1234.0))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, 5)])
def test_band_is_the_mask_of_any_rows_and_keys(causal: bool, window: int | None) -> None:
    band = BandMask(6, 2, causal=causal, sliding_window=window, dtype=torch.float32, device=torch.device("cpu"))
    for rows, first, end in ((6, -9, 1), (1, -3, 1), (4, -30, 3), (6, -2, 1), (2, 0, 1)):
        seen = visible_keys(torch.arange(1 - rows, 1), torch.arange(first, end), causal=causal, sliding_window=window)
        assert seen is not None
        expected = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).repeat_interleave(2, 0)
        assert torch.equal(band.view(rows, first, end)[0, 0], expected)
        assert band.hides(rows, first, end) == (not bool(seen.all()))


def test_requests_alike_are_computed_together_and_others_alone() -> None:
    problem = random_problem(13, AttentionConfig(**SMALL), FLASH_ATTN_NHD, requests=BATCH)
    rig = Rig(problem, Limits(64, 10**6))
    together = [piece.batch for piece in rig.builder.build(0, common_of(problem)).pieces if piece.batch > 1]
    assert sum(together) >= 3
    rig.builder.limits = Limits(64, 0)
    assert {piece.batch for piece in rig.builder.build(0, common_of(problem)).pieces} == {1}
    config = AttentionConfig(**(SMALL | {"batch_invariant": True}))
    alone = Rig(replace(problem, config=config))
    assert {piece.batch for piece in alone.builder.build(0, common_of(problem)).pieces} == {1}


@pytest.mark.parametrize("name", [name for name in VARIANTS if "images" not in name])
@pytest.mark.parametrize("rows", [1, 3])
def test_batches_of_equal_queries(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are grouped without a look at each request; the groups are right, whole batches and parts of them."""
    config = AttentionConfig(**(SMALL | VARIANTS[name]))
    requests = [(rows, seq_len) for seq_len in (30, 31, 3, 30, 33, 4)]
    for several in (requests, requests[:1]):
        rig = Rig(random_problem(14, config, FLASHINFER_NHD, requests=several), Limits(64, 10**6))
        rig.builder._rounds = True  # as on a GPU
        metadata = rig.check_all()
        assert all(piece.keys % 16 == 0 for piece in metadata.pieces)
    problem = random_problem(14, config, FLASHINFER_NHD, requests=requests)
    with monkeypatch.context() as patch:
        patch.setattr(sdpa_build, "equal_queries", lambda *_, alone: None)
        one_by_one = [len(Rig(problem, Limits(64, keys)).check_all().pieces) for keys in (70, 200, 10**6)]
    monkeypatch.setattr(sdpa_build, "requests_of", None)
    pieces = [len(Rig(problem, Limits(64, keys)).check_all().pieces) for keys in (70, 200, 10**6)]
    assert pieces == one_by_one
    assert pieces[0] > pieces[-1] or config.sliding_window is not None


def test_few_keys_are_one_group_whatever_their_padding() -> None:
    requests = [(1, seq_len) for seq_len in (5, 60, 9, 33)]
    problem = random_problem(21, AttentionConfig(**SMALL), FLASH_ATTN_NHD, requests=requests)
    for few, pieces in ((0, 2), (239, 2), (240, 1)):
        assert len(Rig(problem, Limits(64, 10**6, few)).check_all().pieces) == pieces


def scaled(scale: float) -> Terms:
    return Terms.of(AttentionConfig(**SMALL), torch.device("cpu"), scale=scale)


def emulated_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_flash_attention_forward``: aligned at the last key, LSE ``(H, T)``, +inf without keys."""
    window_size = (window_size_left, window_size_right)
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, window_size == (-1, 0), False)
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert max_q == int(cum_seq_q.diff().max())
    assert max_k == int(cum_seq_k.diff().max())
    out, lse = torch.zeros_like(query), torch.full(query.shape[1::-1], torch.inf)
    for request in range(len(cum_seq_q) - 1):
        rows = slice(int(cum_seq_q[request]), int(cum_seq_q[request + 1]))
        part = slice(int(cum_seq_k[request]), int(cum_seq_k[request + 1]))
        count, keys = rows.stop - rows.start, part.stop - part.start
        distance = torch.arange(keys - count, keys)[:, None] - torch.arange(keys)
        left, right = (size if size >= 0 else 10**6 for size in window_size)
        seen = (distance <= left) & (-distance <= right)
        batched = [tensor.transpose(0, 1)[None] for tensor in (query[rows], key[part], value[part])]
        found, found_lse = attend(*batched, scaled(scale), visible=seen)  # type: ignore[misc]
        out[rows] = found[0].transpose(0, 1)
        lse[:, rows] = found_lse[0].masked_fill(found_lse[0].isneginf(), torch.inf)
    return out, lse


@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_HND])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"sliding_window": 7, "sinks": True, "dtype": "bfloat16"},
        {"non_causal": True, "sliding_window": 5},
        {"kv_cache_dtype": "fp8_e4m3", "per_head_quant_scales": True},
        {"batch_invariant": True},
        {"attn_type": "encoder"},
        {"attn_type": "encoder_decoder"},
    ],
)
@pytest.mark.parametrize("call_bytes", [2**28, 2**10])
def test_packed_batches(asked: dict[str, Any], layout: str, call_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "available", lambda functions: True)
    monkeypatch.setattr(varlen, "ATTEND", emulated_varlen)
    monkeypatch.setattr(varlen, "CALL_BYTES", call_bytes)
    config = AttentionConfig(**(SMALL | asked))
    cached = config.has_cache
    requests = (*BATCH, (1, 0), (6, 2)) if cached else tuple((length, length) for _, length in BATCH)
    problem = random_problem(17, config, layout if cached else None, requests=requests)
    calls = Rig(problem).check_all().calls
    alone = config.batch_invariant or (cached and call_bytes < 2**20)
    assert (len(calls) > 4) == alone


def emulated_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: None,
    compute_log_sumexp: bool,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Any, ...]:
    """``_scaled_dot_product_cudnn_attention``: causal from the first key on, LSE ``(1, H, T, 1)``, other results."""
    assert (attn_bias, dropout_p, is_causal, return_debug_mask) == (None, 0.0, True, False)
    assert query.shape[2] == key.shape[2]
    assert key.shape == value.shape
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    out, lse = attend(query, key, value, scaled(scale), visible=seen)
    return out, lse.unsqueeze(-1) if compute_log_sumexp else None, None, None, 0, 0, None, None, None


@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_HND])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"sinks": True, "dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_e4m3", "per_head_quant_scales": True},
        {"batch_invariant": True},
    ],
)
def test_whole_prompts_by_cudnn(asked: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "available", lambda functions: True)
    monkeypatch.setattr(varlen, "ATTEND", emulated_varlen)
    monkeypatch.setattr(cudnn_prompts, "ATTEND", emulated_cudnn)
    monkeypatch.setattr(cudnn_prompts, "LEAST_TOKENS", 16)
    requests = ((1, 30), (17, 17), (16, 40), (16, 16), (3, 3), (1, 0), (40, 40), (6, 2))
    problem = random_problem(19, AttentionConfig(**(SMALL | asked)), layout, requests=requests)
    rig = Rig(problem)
    rig.builder._prompts_by_cudnn = True
    metadata = rig.check_all()
    assert [(prompt.request, prompt.padded) for prompt in metadata.prompts] == [(1, 32), (3, 16), (6, 48)]
    assert not metadata.pieces


def test_prompts_are_padded_to_few_lengths_and_little() -> None:
    lengths = {tokens: rounded(tokens) for tokens in range(1, 8193)}
    assert all(tokens <= padded <= max(tokens + 15, 1.125 * tokens) for tokens, padded in lengths.items())
    assert len({lengths[tokens] for tokens in range(512, 8193)}) == 1 + 4 * 8
    assert lengths[2048] == 2048


def test_the_installed_torch_has_what_cudnn_takes() -> None:
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema
    assert [argument.name for argument in schema.arguments] == list(signature(emulated_cudnn).parameters)
    assert [result.name for result in schema.returns][:2] == ["output", "logsumexp"]


def test_the_installed_torch_has_what_packed_batches_take() -> None:
    known = [argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    emulated = list(signature(emulated_varlen).parameters)
    assert known[: len(emulated) - 2] == emulated[:-2]
    assert set(emulated) <= set(known)
    assert varlen._has_windows() == ({"return_aux", "scale", "window_size"} <= set(signature(varlen_attn).parameters))


GPU: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float16", "sliding_window": 7, "sinks": True},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "per_head_quant_scales": True},
    {"dtype": "bfloat16", "non_causal": True, "sliding_window": 5},
    {"dtype": "bfloat16", "batch_invariant": True, "num_kv_heads": 1},
    {"dtype": "bfloat16", "alibi": True},
    {"dtype": "bfloat16", "mm_prefix": True, "sliding_window": 6},
    {"dtype": "float16", "logits_soft_cap": 3.0, "sinks": True},
    {"dtype": "float32", "sliding_window": 7},
    {"dtype": "float32", "sinks": True, "v_head_size": 8},
    {"dtype": "bfloat16", "attn_type": "encoder_only"},
    {"dtype": "float32", "attn_type": "encoder", "sliding_window": 6},
    {"dtype": "bfloat16", "attn_type": "encoder_decoder", "alibi": True},
    {"dtype": "bfloat16", "attn_type": "encoder_decoder"},
]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [FLASH_ATTN_NHD, FLASHINFER_HND])
@pytest.mark.parametrize("asked", GPU, ids=lambda asked: " ".join(map(str, asked.values())))
def test_on_a_gpu(asked: dict[str, Any], layout: str) -> None:
    config = AttentionConfig(**(SMALL | {"head_size": 64} | asked))
    requests = BATCH
    if not config.has_cache:
        requests = tuple((seq_len, seq_len) for _, seq_len in BATCH)
    elif not config.mm_prefix:
        requests = (*BATCH, (1, 0), (6, 2))
    problem = random_problem(14, config, layout if config.has_cache else None, requests=requests, device="cuda")
    rig = Rig(problem)
    common = common_of(problem)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metadata = rig.builder.build(0, common)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(metadata.calls) == (rig.context.plans["prefill"].kernel_name in ("torch-varlen", "torch-cudnn"))
    rig.check(*rig.run(metadata))


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [{}, {"sinks": True}, {"kv_cache_dtype": "fp8_e4m3"}], ids=str)
def test_prompts_on_a_gpu(asked: dict[str, Any]) -> None:
    config = AttentionConfig(**(SMALL | {"head_size": 128, "dtype": "bfloat16", "block_size": 16} | asked))
    requests = ((1, 700), (512, 512), (40, 700), (700, 700), (20, 20))
    problem = random_problem(20, config, FLASHINFER_NHD, requests=requests, device="cuda")
    rig = Rig(problem)
    metadata = rig.check_all()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert [prompt.padded for prompt in metadata.prompts] == ([512, 704] if hopper else [])


@pytest.mark.gpu
def test_cascade_on_a_gpu() -> None:
    for asked in ({"dtype": "bfloat16"}, {"dtype": "float32", "sinks": True}):
        config = AttentionConfig(**(SMALL | {"head_size": 64} | asked))
        problem = random_problem(15, config, FLASH_ATTN_NHD, requests=((1, 30), (4, 22), (1, 17)), device="cuda")
        assert problem.block_table is not None
        problem.block_table[1:, :2] = problem.block_table[:1, :2]
        rig = Rig(problem)
        rig.cache = problem.written_cache()
        rig.check(*rig.run(rig.builder.build(8, common_of(problem))))


def test_tiles_grow_with_threads_and_shrink_with_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(16, AttentionConfig(**SMALL), FLASH_ATTN_NHD, requests=BATCH)
    context = Rig(problem).context
    usual = SDPABuilder(context).limits.tile_rows
    assert SDPABuilder(replace(context, max_model_len=2**21)).limits.tile_rows < usual
    monkeypatch.setattr(sdpa_build.torch, "get_num_threads", lambda: 64)
    assert SDPABuilder(context).limits.tile_rows > usual
