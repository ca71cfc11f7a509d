"""What the tests of TRITON_MLA share: groups on this machine's GPU or in the interpreter, batches, what is expected."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from attn_select import AttentionConfig, select
from attn_select.reference.oracle_quant import quantize_query
from attn_select.reference.running import impl_of
from attn_select.runtime import BlockTable, Capacity, Outputs, Scales, attention_group, prepare_batch
from attn_select.testing import attention_reference, lse_error, relative_error, selection_of
from attn_select_triton.facts.triton_mla import TRITON_MLA
from attn_select_triton.kernels.pieces import list_pieces

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = "bfloat16" if ON_GPU else "float16"
"""Triton's interpreter multiplies the bits of bfloat16 as if they were integers."""
SMALL = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
WITHOUT_GLUON = "l40s"
"""A GPU that no Gluon kernel is for: the interpreter runs none."""
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def layer_config(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 3, "dtype": DTYPE, **SMALL, **fields})


def group_of(config: AttentionConfig, capacity: Capacity | None = None, **options: Any) -> Any:
    """Return a group on this machine's GPU, or in the interpreter as if for another than Hopper."""
    capacity = capacity or Capacity(8, 256, 512)
    if ON_GPU:
        return attention_group(select(config, backend="TRITON_MLA"), capacity=capacity, **options)
    return attention_group(selection_of(TRITON_MLA, config, WITHOUT_GLUON), "cpu", capacity, **options)


def parts_of(group: Any, k_scale: float = 1.0) -> tuple[Any, Any]:
    """Return builder and impl of decode."""
    served = group.backends["decode"]
    return served.builder, impl_of(served, scale=0.125, scales=Scales.make(DEVICE, k=k_scale))


def batch(
    group: Any, query_lens: Sequence[int], seq_lens: Sequence[int], seed: int = 0, given: Sequence[Any] = ()
) -> tuple[Any, Any, Any]:
    """Return a batch in random blocks, a cache whose other slots are NaN, and the requests' latents, drawn or given."""
    draw = torch.Generator().manual_seed(seed)
    size = group.block_size
    width = max(1, -(-max(seq_lens) // size))
    blocks = torch.randperm(len(seq_lens) * width + 1, generator=draw).tolist()
    table = BlockTable(len(seq_lens), width, size, group.device)
    config = group.config
    stored = FP8.get(config.cache_dtype) or getattr(torch, config.cache_dtype)
    cache = torch.full((len(blocks), size, config.head_size), torch.nan).to(stored)
    latents = []
    for request, length in enumerate(seq_lens):
        own = blocks[request * width : (request + 1) * width]
        table.set_row(request, own)
        latents.append(given[request] if given else torch.randn(length, config.head_size, generator=draw).to(stored))
        for position in range(0, length, size):
            some = latents[-1][position : position + size]
            cache[own[position // size]].view(torch.uint8)[: len(some)] = some.view(torch.uint8)
    new_lens = list(map(min, query_lens, seq_lens))
    return prepare_batch(query_lens, seq_lens, table, new_lens=new_lens), cache.to(group.device), latents


def queries(group: Any, tokens: int, seed: int = 1) -> Any:
    draw = torch.Generator().manual_seed(seed)
    config = group.config
    made = torch.randn(tokens, config.num_heads, config.head_size, generator=draw)
    return made.to(getattr(torch, config.dtype)).to(group.device)


def decode(group: Any, common: Any, cache: Any, query: Any, scale: float = 1.0, padding: int = 0) -> tuple[Any, Any]:
    """Return output and LSE of ``forward_mqa`` on poisoned memory; ``padding`` rows lie behind the batch's."""
    builder, impl = parts_of(group, scale)
    rows = len(query) + padding
    output = torch.full((rows, query.shape[1], group.config.kv_lora_rank), torch.nan, dtype=query.dtype, device=DEVICE)
    lse = torch.full((rows, query.shape[1]), torch.nan, device=DEVICE)
    query = torch.cat([query, torch.full_like(query[:1], torch.nan).expand(padding, -1, -1)]) if padding else query
    impl.forward_mqa(query, cache, builder.build(0, common), Outputs(output, lse))
    return output.cpu(), lse.cpu()


def expected(group: Any, common: Any, query: Any, latents: Any, *, causal: bool = True, scale: float = 1.0) -> Any:
    rank, found = group.config.kv_lora_rank, []
    query, seen_as = query.cpu(), group.backends["decode"].context.plans["decode"].query_dtype
    if seen_as in FP8:
        query = quantize_query(query, seen_as)
    for latent, (first, last) in zip(latents, itertools.pairwise(common.query_start_loc_cpu.tolist()), strict=True):
        keys = latent.double().unsqueeze(1) * scale
        found.append(attention_reference(query[first:last], keys, keys[..., :rank], scale=0.125, causal=causal))
    return torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found])


def close(found: tuple[Any, Any], wanted: tuple[Any, Any], lse_bound: float = 5e-3) -> None:
    tokens = len(wanted[0])
    assert relative_error(found[0][:tokens], wanted[0]).row < (2e-2 if ON_GPU else 2e-3)
    assert lse_error(found[1][:tokens], wanted[1]) < lse_bound


def listed(query_start_loc: Any, seq_lens: Any, splits: int, split_tokens: int) -> dict[str, Any]:
    """Return ``mla_decode``'s list of pieces of ``split_tokens`` keys, at most ``splits`` of a request."""
    pieces = list_pieces(
        query_start_loc, seq_lens, capacity=len(seq_lens) * splits, split_tokens=split_tokens, most_splits=splits,
        merges=len(seq_lens),
    )  # fmt: skip
    return {"pieces": pieces, "merges": len(seq_lens)}
