"""``SparseIndexer``: the choice of tokens against float64, on paged caches with poison around what was written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from attn_select import select
from attn_select.reference.oracle import attention_reference
from attn_select.reference.oracle_indexer import index_scores_reference, quantized_rows, wrong_choice
from attn_select.reference.oracle_mla import absorb_query, project_output
from attn_select.runtime import (
    BatchError,
    BlockTable,
    Capacity,
    MLAAttention,
    MLAAttentionGroup,
    SparseIndexer,
    prepare_batch,
)
from attn_select.runtime.torch_indexer import index_key_views
from attn_select.testing import mla_layer

CacheDType = Literal["fp8_e4m3", "auto"]
BLOCK, TOP_K, HEADS, DIM = 16, 24, 4, 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REQUESTS = ((1, 40), (3, 19), (30, 30), (17, 65), (1, 1), (1, 16))
DIMS = {"num_heads": 3, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def group_on(device: str, **changes: Any) -> MLAAttentionGroup:
    fields = {"dtype": "float32", "block_size": BLOCK, "sparse_top_k": TOP_K, **DIMS, **changes}
    selection = select(mla_layer(**fields), device="cpu", backend="TORCH_MLA_SPARSE")
    return MLAAttentionGroup(selection, device, Capacity(8, 256, 128))


class Step:
    """One step of one indexer: contexts are cached in an earlier call, all in random blocks between poison."""

    def __init__(
        self, requests: Sequence[tuple[int, int]], cache_dtype: CacheDType, device: str, group: Any = None
    ) -> None:
        self.group = group or group_on(device)
        self.indexer = SparseIndexer(self.group, num_heads=HEADS, head_dim=DIM, cache_dtype=cache_dtype)
        self.requests, self.fp8 = requests, cache_dtype != "auto"
        draw = torch.Generator().manual_seed(0)
        dtype = getattr(torch, self.group.config.dtype)
        self.keys = [torch.randn(length, DIM, generator=draw).to(device, dtype) for _, length in requests]
        tokens = sum(count for count, _ in requests)
        self.query = torch.randn(tokens, HEADS, DIM, generator=draw).to(device, dtype)
        self.weights = torch.randn(tokens, HEADS, generator=draw).to(device)
        self.table = BlockTable(len(requests), 8, BLOCK, device)
        drawn = torch.randperm(60, generator=draw).tolist()
        self.blocks = [drawn[7 * row : 7 * row + -(-length // BLOCK)] for row, (_, length) in enumerate(requests)]
        for row, blocks in enumerate(self.blocks):
            self.table.set_row(row, blocks)
        self.cache = self.indexer.allocate_cache(60)
        self.cache.view(torch.uint8).fill_(0xFF)

    def write_contexts(self) -> None:
        """Cache what the requests had before this step, by a step of its own."""
        for row, (count, length) in enumerate(self.requests):
            if past := length - count:
                common = prepare_batch([past], [past], self.only(row))
                zeros = self.query.new_zeros(past, HEADS, DIM)
                metadata = self.group.build(common)
                self.indexer(zeros, self.keys[row][:past], zeros[..., 0].float(), self.cache, metadata)

    def only(self, row: int) -> BlockTable:
        table = BlockTable(1, 8, BLOCK, self.group.device)
        table.set_row(0, self.blocks[row])
        return table

    def run(self) -> Tensor:
        self.write_contexts()
        counts, lengths = zip(*self.requests, strict=True)
        self.metadata = self.group.build(prepare_batch(list(counts), list(lengths), self.table))
        new = torch.cat([keys[-count:] for keys, (count, _) in zip(self.keys, self.requests, strict=True)])
        return self.indexer(self.query, new, self.weights, self.cache, self.metadata)

    def slots(self, row: int) -> Tensor:
        """Slots of a request's tokens."""
        length = self.requests[row][1]
        position = torch.arange(length, device=self.group.device)
        return self.table.device_table[row][position // BLOCK].long() * BLOCK + position % BLOCK

    def check(self, chosen: Tensor) -> None:
        token = 0
        for row, (count, length) in enumerate(self.requests):
            slots, query = self.slots(row), slice(token, token + count)
            scores = index_scores_reference(self.query[query], self.weights[query], self.keys[row], fp8=self.fp8)
            for own in range(count):
                found = chosen[token + own]
                num_keys = length - count + own + 1
                wanted = min(TOP_K, num_keys)
                assert bool((found[:wanted] >= 0).all()), (row, own)
                assert bool((found[wanted:] == -1).all()), (row, own)
                places = (found[:wanted, None] == slots).int()
                assert bool((places.sum(1) == 1).all()), f"request {row}, token {own}: slots of another request"
                wrong = wrong_choice(places.argmax(1), scores[own], num_keys, TOP_K)
                assert wrong is None, f"request {row}, token {own}: {wrong}"
            token += count


@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_best_tokens_are_chosen(cache_dtype: CacheDType, dtype: str, device: str) -> None:
    step = Step(REQUESTS, cache_dtype, device, group_on(device, dtype=dtype))
    step.check(step.run())


def test_the_fp8_cache_is_in_the_published_layout() -> None:
    """A block: the codes of all its tokens, then their scales; what was not written stays as it was."""
    step = Step(((5, 5),), "fp8_e4m3", "cpu")
    step.run()
    (block,) = step.blocks[0]
    raw = step.cache.view(60, -1)[block]
    codes = raw[: 5 * DIM].view(torch.float8_e4m3fn).double().view(5, DIM)
    scales = raw[BLOCK * DIM : BLOCK * DIM + 5 * 4].view(torch.float32).double()
    assert torch.equal(codes * scales[:, None], quantized_rows(step.keys[0]))
    assert bool((scales.log2() == scales.log2().round()).all())
    assert bool((raw[5 * DIM : BLOCK * DIM] == 0xFF).all())
    assert bool((raw[BLOCK * DIM + 20 :] == 0xFF).all())
    views = index_key_views(step.cache, DIM)
    assert views[0].data_ptr() == step.cache.data_ptr()


def test_a_layer_attends_to_what_its_indexer_chose() -> None:
    """Indexer and attention together are the softmax over the chosen tokens of all."""
    group = group_on("cpu")
    step = Step(((40, 40),), "auto", "cpu", group)
    chosen = step.run()
    nope, rope, rank = 16, 8, 32
    query = torch.randn(40, 3, nope + rope)
    latent, k_pe = torch.randn(40, rank), torch.randn(40, rope)
    weight = torch.randn(3 * (nope + 24), rank) * rank**-0.5
    layer = MLAAttention(group, weight)
    kv_cache = group.allocate_kv_cache(60)
    output = layer(query, latent, k_pe, kv_cache, step.metadata, topk_indices=chosen)
    by_head = weight.view(3, -1, rank).permute(2, 0, 1)
    slots = step.slots(0)
    for token in range(40):
        places = (chosen[token][chosen[token] >= 0][:, None] == slots).int().argmax(1)
        row = slice(token, token + 1)
        absorbed = absorb_query(query[row, :, :nope], query[row, :, nope:], by_head[..., :nope])
        keys = torch.cat([latent[places], k_pe[places]], dim=-1)[:, None]
        found, _ = attention_reference(
            absorbed, keys, latent[places][:, None], scale=(nope + rope) ** -0.5, causal=False
        )
        wanted = project_output(found, by_head[..., nope:])
        torch.testing.assert_close(output[token].double(), wanted[0], rtol=1e-4, atol=1e-5)


def test_wrong_arguments_are_named() -> None:
    step = Step(((2, 2),), "fp8_e4m3", "cpu")
    step.run()
    key = step.keys[0]
    with pytest.raises(BatchError, match=r"weights of shape \(1, 4\): accepted is \(at least 2 tokens, 4\)"):
        step.indexer(step.query, key, step.weights[:1], step.cache, step.metadata)
    with pytest.raises(BatchError, match=r"weights of shape \(2, 3\): accepted is \(at least 2 tokens, 4\)"):
        step.indexer(step.query, key, step.weights[:, :3], step.cache, step.metadata)
    with pytest.raises(BatchError, match=r"index_cache is torch.uint8 of shape \(60, 16, 35\)"):
        step.indexer(step.query, key, step.weights, step.cache[..., 1:], step.metadata)
    other = Step(((2, 2),), "fp8_e4m3", "cpu")
    with pytest.raises(BatchError, match="built by another group"):
        other.indexer(step.query, key, step.weights, step.cache, step.metadata)


@pytest.mark.parametrize("whose", ["another request's", "never written"])
def test_checked_mode_names_a_slot_of_no_token_of_the_request(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")
    group = group_on("cpu")
    step = Step(((2, 5), (3, 4)), "fp8_e4m3", "cpu", group)
    chosen = step.run()
    layer = MLAAttention(group, torch.zeros(3 * (16 + 24), 32))
    inputs = (torch.randn(5, 3, 24), torch.randn(5, 32), torch.randn(5, 8), group.allocate_kv_cache(60), step.metadata)
    layer(*inputs, topk_indices=chosen)
    first, second = (BLOCK * blocks[0] for blocks in step.blocks)
    wrong = first + 3 if whose == "another request's" else second + 4
    chosen[3, 2] = wrong
    text = rf"topk_indices\[3, 2\] = {wrong} \(token 1 of request 1\): accepted are the slots of the request's 4 tokens"
    with pytest.raises(BatchError, match=text):
        layer(*inputs, topk_indices=chosen)
