"""One step of a whole MLA layer as data, as an engine calls ``MLAAttention``, and its solution by the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select.config import AttentionConfig
from attn_select.layouts import MLA
from attn_select.testing.oracle import attention_options
from attn_select.testing.oracle_mla import absorb_query, mla_reference, project_output
from attn_select.testing.oracle_paged import gather_reference, slot_mapping_reference
from attn_select.testing.oracle_problems import Problem, Request
from attn_select.testing.oracle_quant import PLAIN_DTYPES
from attn_select.testing.oracle_random import random_problem, random_requests


@dataclasses.dataclass(frozen=True, slots=True)
class MLAProblem:
    """A ``Problem`` with the layer's query and weight, which absorption turns into the problem's own query.

    Decodes come first, as an MLA layer wants them.
    """

    step: Problem
    """Batch, cache, tables, slots, scales, sinks. ``key`` is ``kv_c``, ``value`` is ``k_pe``, the query absorbed."""
    query: Tensor
    """``(T, H, P + Pr)`` in the config's dtype."""
    kv_b_proj: Tensor
    """``(H * (P + V), R)`` in the config's dtype; head by head the rows of W_UK, then of W_UV."""

    def to(self, device: torch.device | str) -> MLAProblem:
        """Return the same problem with its tensors on ``device``."""
        return MLAProblem(self.step.to(device), self.query.to(device), self.kv_b_proj.to(device))

    @property
    def num_decode_requests(self) -> int:
        """Leading requests whose query is at most ``1 + num_speculative_tokens`` tokens long."""
        threshold = 1 + self.step.config.num_speculative_tokens
        is_prefill = [query_len > threshold for query_len, _ in self.step.requests]
        return (*is_prefill, True).index(True)

    def reference(
        self,
        num_decode_requests: int | None = None,
        *,
        kv_cache: Tensor | None = None,
        query_dtype: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return output float64 ``(T, H, V)`` and natural-log LSE float64 ``(T, H)``.

        Decodes read everything from the cache, this step's latents as it stores them. Prefills read their context from
        the cache and this step's latents as they are. With sparse MLA all requests are computed like decodes.

        Args:
            num_decode_requests: leading requests that are decodes; left out: the property of that name.
            kv_cache: the cache after this step's write; left out: ``step.written_cache()``.
            query_dtype: an FP8 dtype where the decode path quantises the absorbed query with ``q_scale``.
        """
        step, config = self.step, self.step.config
        decodes = self.num_decode_requests if num_decode_requests is None else num_decode_requests
        cache = step.written_cache() if kv_cache is None else kv_cache
        if query_dtype is not None:  # a layer's absorbed query is rounded to the config's dtype before
            step = dataclasses.replace(step, query=step.query.to(self.query.dtype))
        output, lse = step.reference(kv_cache=cache, query_dtype=query_dtype)
        w_uk, w_uv = _weights(self.kv_b_proj, config)
        output = project_output(output, w_uv)
        if config.sparse:
            return output, lse
        assert step.layout is not None
        assert step.block_size is not None
        assert step.block_table is not None
        options = attention_options(config, step.alibi_slopes, step.sinks)
        bounds = step.query_start_loc.tolist()
        rank, nope = len(w_uk), w_uk.shape[2]
        for request, (query_len, seq_len) in list(enumerate(step.requests))[decodes:]:
            rows = slice(bounds[request], bounds[request + 1])
            positions = torch.arange(seq_len - query_len, device=cache.device)
            slots = slot_mapping_reference(step.block_table[request], positions, step.block_size)
            context, _ = gather_reference(cache, step.layout, slots, config, k_scale=step.k_scale)
            kv_c = torch.cat([context[:, 0, :rank], step.key[rows].double()])
            k_pe = torch.cat([context[:, 0, rank:], step.value[rows].double()])
            q_nope, q_pe = self.query[rows, :, :nope], self.query[rows, :, nope:]
            if step.mm_prefix_ranges is not None:
                options["mm_prefix_ranges"] = step.mm_prefix_ranges[request]
            output[rows], lse[rows] = mla_reference(q_nope, q_pe, kv_c, k_pe, w_uk, w_uv, scale=step.scale, **options)
        return output, lse


def random_mla_problem(
    seed: int, config: AttentionConfig, layout: str = MLA, *, requests: Sequence[Request] | None = None, **options: Any
) -> MLAProblem:
    """Draw one step of one MLA layer: ``random_problem`` with decodes moved to the front, a query and a weight.

    Args:
        layout: ``MLA`` or ``FP8_DS_MLA``.
        requests: ``(query_len, seq_len)`` each, in any order; left out: ``random_requests``.
        options: as in ``random_problem``.
    """
    size = config.block_size or options.get("block_size", 16)
    drawn = requests or random_requests(seed, config, block_size=size)
    in_order = sorted(drawn, key=lambda request: request[0] > 1 + config.num_speculative_tokens)
    step = random_problem(seed, config, layout, requests=in_order, **options)
    rank, nope = config.kv_lora_rank or 0, config.qk_nope_head_dim or 0
    width, value_size = nope + (config.qk_rope_head_dim or 0), config.v_head_dim or 0
    draw = torch.Generator().manual_seed(seed + 1)
    query = torch.randn(len(step.query), config.num_heads, width, generator=draw).to(PLAIN_DTYPES[config.dtype])
    weight = torch.randn(config.num_heads * (nope + value_size), rank, generator=draw) * rank**-0.5
    weight = weight.to(query.dtype)
    absorbed = absorb_query(query[..., :nope], query[..., nope:], _weights(weight, config)[0])
    device = options.get("device", "cpu")
    return MLAProblem(dataclasses.replace(step, query=absorbed.to(device)), query.to(device), weight.to(device))


def _weights(kv_b_proj: Tensor, config: AttentionConfig) -> tuple[Tensor, Tensor]:
    """Return W_UK ``(R, H, P)`` and W_UV ``(R, H, V)``."""
    by_head = kv_b_proj.view(config.num_heads, -1, kv_b_proj.shape[1]).permute(2, 0, 1)
    nope = config.qk_nope_head_dim or 0
    return by_head[..., :nope], by_head[..., nope:]
