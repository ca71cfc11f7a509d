"""MLA decode kernels against the float64 oracle: small in the interpreter, large on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton_mla_layers import listed  # noqa: E402

from attn_select import AttentionConfig  # noqa: E402
from attn_select.layer.layouts import MLA  # noqa: E402
from attn_select.reference.oracle_quant import quantize_query  # noqa: E402
from attn_select.testing import lse_error, paged_reference, relative_error, write_reference  # noqa: E402
from attn_select_triton.kernels import mla_cache, mla_decode  # noqa: E402
from attn_select_triton.kernels.mla_decode import MLALaunch  # noqa: E402

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
DTYPE = "bfloat16" if torch.cuda.is_available() else "float16"
"""Triton's interpreter multiplies the bits of bfloat16 as if they were integers."""
SMALL = MLALaunch(16, 16, 4, 2)
TALL = MLALaunch(64, 32, 4, 2)


def config_of(heads: int, rank: int, rope: int, *, dtype: str = "", cache: str = "auto", causal: bool = True) -> Any:
    return AttentionConfig(
        num_heads=heads, num_kv_heads=1, head_size=rank + rope, kv_lora_rank=rank, qk_nope_head_dim=32,
        qk_rope_head_dim=rope, v_head_dim=32, dtype=dtype or DTYPE, kv_cache_dtype=cache, non_causal=not causal,
    )  # fmt: skip


class Batch:
    """A paged batch in random block order; every slot that no request owns is NaN, and so is the output."""

    def __init__(
        self,
        lens: list[int],
        query_lens: list[int],
        config: Any,
        page: int,
        device: str,
        *,
        spare: int = 0,
        seed: int = 0,
        query_dtype: str = "",
    ) -> None:
        draw = torch.Generator().manual_seed(seed)
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        width = max(1, max(-(-length // page) for length in lens)) + spare
        blocks = len(lens) * width
        cache = torch.randn(blocks, page, rank + rope, generator=draw)
        table = torch.randperm(blocks, generator=draw).int().view(len(lens), width)
        self.kv_scale = 1.0
        if config.kv_cache_dtype in FP8:
            self.kv_scale = 0.5
            cache = (cache / self.kv_scale).to(FP8[config.kv_cache_dtype])
        else:
            for request, length in enumerate(lens):
                position = torch.arange(width * page)
                free = position[position >= length]
                cache[table[request].long()[free // page], free % page] = torch.nan
            cache = cache.to(getattr(torch, config.cache_dtype))
        tokens = sum(query_lens)
        start = torch.tensor([0, *query_lens]).cumsum(0).int()
        query = torch.randn(tokens, config.num_heads, rank + rope, generator=draw).to(dtype)
        self.config, self.scale, self.max_query_len = config, (rank + rope) ** -0.5, max(query_lens)
        self.query, self.cache, self.table = query.to(device), cache.to(device), table.to(device)
        self.start, self.lens = start.to(device), torch.tensor(lens, dtype=torch.int32, device=device)
        seen = quantize_query(query, query_dtype) if query_dtype else query
        self.expected, self.expected_lse = paged_reference(
            seen, cache, MLA, table, start, torch.tensor(lens), config, self.scale,
            k_scale=self.kv_scale if config.kv_cache_dtype in FP8 else None,
        )  # fmt: skip

    def run(self, launch: MLALaunch, splits: int = 1, split_tokens: int = 0) -> tuple[Any, Any]:
        """Decode in so many even shares, or in pieces of so many tokens; the workspace holds NaN before."""
        tokens, heads, _ = self.query.shape
        rank = self.config.kv_lora_rank
        output = torch.full((tokens, heads, rank), torch.nan, dtype=self.query.dtype, device=self.query.device)
        lse = torch.full((tokens, heads), torch.nan, device=self.query.device)
        split: dict[str, Any] = {"num_splits": splits}
        if split_tokens:
            split = listed(self.start, self.lens, splits, split_tokens)
        size = len(self.lens) * splits * mla_decode.mla_workspace(self.max_query_len, heads, rank)
        workspace = torch.full((size,), torch.nan, device=self.query.device)
        mla_decode.mla_decode(
            self.query, self.cache, output, query_start_loc=self.start, seq_lens=self.lens, block_table=self.table,
            max_query_len=self.max_query_len, scale=self.scale, launch=launch, workspace=workspace,
            causal=not self.config.non_causal, kv_scale=self.kv_scale, output_lse=lse, **split,
        )  # fmt: skip
        return output.cpu(), lse.cpu()

    def check(self, launch: MLALaunch, splits: int = 1, split_tokens: int = 0) -> None:
        output, lse = self.run(launch, splits, split_tokens)
        assert relative_error(output, self.expected).row < 1e-2
        assert lse_error(lse, self.expected_lse) < 5e-3


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("launch", [SMALL, TALL], ids=["16x16", "64x32"])
@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_at_page_boundaries_and_empty_requests(launch: MLALaunch, splits: int) -> None:
    config = config_of(5, 32, 16)
    Batch([0, 1, 15, 16, 17, 40], [1] * 6, config, 16, device()).check(launch, splits)


@pytest.mark.parametrize(("rank", "rope"), [(16, 16), (48, 32), (64, 48)])
@pytest.mark.parametrize("heads", [1, 3, 20])
def test_sizes_that_are_no_powers_of_two(rank: int, rope: int, heads: int) -> None:
    Batch([21, 33], [1, 1], config_of(heads, rank, rope), 16, device()).check(SMALL, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("launch", [SMALL, TALL], ids=["16x16", "64x32"])
def test_several_query_tokens_of_different_numbers(causal: bool, launch: MLALaunch) -> None:
    config = config_of(6, 32, 16, causal=causal)
    Batch([35, 4, 2, 18], [3, 4, 0, 1], config, 16, device()).check(launch, 2)


@pytest.mark.parametrize(
    ("cache", "dtype"), [("fp8_e4m3", "float16"), ("fp8_e5m2", "float16"), ("bfloat16", "float16")]
)
def test_cache_in_another_dtype(cache: str, dtype: str) -> None:
    Batch([19, 32], [1, 2], config_of(4, 32, 16, dtype=dtype, cache=cache), 32, device()).check(SMALL, 2)


def test_tiles_that_share_a_page_and_pages_that_share_a_tile() -> None:
    config = config_of(4, 32, 16)
    for page in (16, 48, 64):
        Batch([70, 97], [1, 1], config, page, device()).check(TALL, 2)


def test_through_tensor_descriptors() -> None:
    launch = MLALaunch(16, 16, 4, 2, described=True)
    Batch([30, 64], [1, 1], config_of(4, 32, 16), 32, device()).check(launch, 2)


@pytest.mark.parametrize("block_m", [16, 64])
def test_strides_that_do_not_suit_the_hopper_kernel(block_m: int) -> None:
    batch = Batch([70, 5], [1, 2], config_of(4, 32, 16), 64, device())
    wide = batch.cache.new_full((*batch.cache.shape[:2], 49), torch.nan)
    wide[..., :48] = batch.cache
    batch.cache = wide[..., :48]
    batch.check(MLALaunch(block_m, 64, 4, 1, True, True), 2)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("heads", [1, 4])
def test_tma_finds_every_row_of_a_query_at_one_distance(heads: int, tokens: int) -> None:
    whole = torch.arange(tokens * 2 * heads * 24.0).view(tokens, 2 * heads, 24)
    by_head = torch.arange(heads * tokens * 16.0).view(heads, tokens, 16).transpose(0, 1)
    for query in (whole[:, :heads], whole[:, :heads, 16:], whole[:, ::2, :16], by_head):
        found = mla_decode._in_rows(query)
        assert torch.equal(found, query)
        size = query.shape[2]
        rows = found.as_strided((tokens * heads, size), (found.stride(1), 1))
        assert torch.equal(rows, query.reshape(-1, size))
        assert found.stride(0) == heads * found.stride(1)


@pytest.mark.parametrize("launch", [SMALL, TALL], ids=["16x16", "64x32"])
@pytest.mark.parametrize("causal", [True, False])
def test_requests_of_one_piece_beside_requests_of_many(launch: MLALaunch, causal: bool) -> None:
    """More pieces than are merged at once, few, two, one, none, and one that only some drafts of a request see."""
    config = config_of(6, 32, 16, causal=causal)
    batch = Batch([700, 20, 0, 65, 130, 5, 33], [2, 3, 1, 1, 4, 0, 3], config, 16, device())
    batch.check(launch, 22, 32)


def test_fixed_splits_give_the_same_bits_beside_any_other_request() -> None:
    config = config_of(4, 32, 16)
    alone = Batch([150], [1], config, 16, device())
    one, one_lse = alone.run(SMALL, 3, 64)
    beside = Batch([150], [1], config, 16, device(), spare=12)
    beside.query, beside.cache = alone.query.repeat(2, 1, 1), alone.cache
    beside.table = torch.cat([alone.table, alone.table.flip(1)])
    beside.start = torch.tensor([0, 1, 2], dtype=torch.int32, device=alone.start.device)
    beside.lens = torch.tensor([150, 130], dtype=torch.int32, device=alone.lens.device)
    two, two_lse = beside.run(SMALL, 5, 64)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one_lse[0], two_lse[0])


def test_splits_keep_to_the_reserved_workspace() -> None:
    """Fewer than 2 x SMs programs wherever keys are split (``hardware.split_workspace``)."""
    for sms in (16, 108, 132):
        for programs in (1, 2, 7, 100, 128, 200, 1000):
            for length in (1, 64, 1000, 131072):
                splits = mla_decode.mla_num_splits(programs, length, sms)
                assert 1 <= splits <= max(1, -(-length // 64))
                assert splits == 1 or splits * programs < 2 * sms


GPU_CASES = [
    (heads, lens, query_len, page)
    for heads in (1, 16, 71, 128)
    for query_len in (1, 3)
    for page in (16, 64, 128)
    for lens in ([4096, 63, 0, 1, 1000], [65, 64, 640])
]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "lens", "query_len", "page"), GPU_CASES)
def test_deepseek_sizes_on_a_gpu(heads: int, lens: list[int], query_len: int, page: int) -> None:
    config = config_of(heads, 512, 64)
    batch = Batch(lens, [query_len if length else 1 for length in lens], config, page, "cuda")
    capability = torch.cuda.get_device_capability()
    launch = mla_decode.mla_launch(capability, heads * query_len, 512, 64, page, torch.bfloat16, torch.bfloat16)
    for splits, split_tokens in ((1, 0), (5, 0), (5, 1024)):
        batch.check(launch, splits, split_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "dtype"), [("fp8_e4m3", "bfloat16"), ("fp8_e5m2", "bfloat16"), ("auto", "float16")])
@pytest.mark.parametrize("heads", [16, 128])
def test_dtypes_on_a_gpu(cache: str, dtype: str, heads: int) -> None:
    stored = FP8.get(cache) or getattr(torch, dtype)
    launch = mla_decode.mla_launch(
        torch.cuda.get_device_capability(), heads * 2, 512, 64, 64, getattr(torch, dtype), stored
    )
    config = config_of(heads, 512, 64, dtype=dtype, cache=cache)
    rounded = cache if launch.hopper and cache in FP8 else ""
    Batch([1000, 64, 5], [1, 2, 1], config, 64, "cuda", query_dtype=rounded).check(launch, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_reads_new_lengths_and_tables(heads: int) -> None:
    config = config_of(heads, 512, 64)
    batch = Batch([1000, 64, 129], [1, 1, 1], config, 64, "cuda", seed=1)
    other = Batch([700, 1, 1024], [1, 1, 1], config, 64, "cuda", seed=2)
    launch = mla_decode.mla_launch(
        torch.cuda.get_device_capability(), heads, 512, 64, 64, torch.bfloat16, torch.bfloat16
    )
    output = torch.full((3, heads, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    workspace = torch.full((3 * heads * 4 * 513,), torch.nan, device="cuda")

    def run() -> None:
        mla_decode.mla_decode(
            batch.query, batch.cache, output, query_start_loc=batch.start, seq_lens=batch.lens,
            block_table=batch.table, max_query_len=1, scale=batch.scale, launch=launch, num_splits=4,
            workspace=workspace,
        )  # fmt: skip

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for name in ("query", "cache", "table", "lens"):
        getattr(batch, name).copy_(getattr(other, name))
    output.fill_(torch.nan)
    graph.replay()
    assert relative_error(output.cpu(), other.expected).row < 1e-2


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_writes_latents_and_rope_parts_to_their_slots_and_nothing_else(cache_dtype: str) -> None:
    config = config_of(4, 48, 16, cache=cache_dtype)
    draw = torch.Generator().manual_seed(0)
    dtype = FP8.get(cache_dtype, getattr(torch, DTYPE))
    cache = torch.randn(3, 16, 64, generator=draw).to(dtype)
    expected = cache.clone()
    # Views of one wider tensor, as a projection gives them; 6e4 saturates.
    both = torch.randn(5, 80, generator=draw)
    if not torch.cuda.is_available():
        both = both.to(dtype).float() / 2  # the interpreter's rounding to FP8 loses carries into the exponent
    both = both.to(getattr(torch, DTYPE))
    both[0, 0], both[1, 50] = 6e4, -6e4
    slots = torch.tensor([47, 0, -1, 16, 15])
    write_reference(
        expected, both[:, :48], both[:, 48:64], slots, MLA, config, k_scale=0.5 if cache_dtype in FP8 else None
    )
    written, source = cache.to(device()), both.to(device())
    scale = torch.tensor(0.5, device=device())
    mla_cache.concat_and_cache_mla(source[:, :48], source[:, 48:64], written, slots.to(device()), scale)
    assert torch.equal(written.cpu().view(torch.uint8), expected.view(torch.uint8))
