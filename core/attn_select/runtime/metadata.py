"""What one step's batch looks like to every attention layer: ``CommonAttentionMetadata``, and how to cut it in parts.

Tokens of all requests lie one request behind the other. Token t of request r stands at position
``seq_lens[r] - query_len + t`` of its sequence: the step's tokens are the last ones. Names are vLLM's
(v1/attention/backend.py, 0.33).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from attn_select.errors import AttnSelectError
from attn_select.layer.config import Phase

Ranges = Sequence[tuple[int, int]]
"""Inclusive ``(first, last)`` positions of one request's image tokens."""


class BatchError(AttnSelectError, ValueError):
    """A batch that a layer, builder or graph cannot take: names the argument, the request and what is accepted."""

    code = "invalid-batch"


@dataclass(slots=True)
class CommonAttentionMetadata:
    """One batch of B requests and T tokens, the same for all layers. Treat as immutable.

    Builders take what the host must know from the ``_cpu`` copies; reading a device tensor back would stop the GPU.

    Attributes:
        query_start_loc: int32 ``(B + 1,)`` on the device, prefix sums of the query lengths.
        query_start_loc_cpu: the same on the host.
        seq_lens: int32 ``(B,)`` on the device: keys of each request, this step's included. In cross-attention the
            length of the encoder's sequence; without a cache (encoders) the query length.
        seq_lens_cpu: the same on the host; of decodes, bounds above where every builder ``takes_length_bounds``.
        num_reqs: B.
        num_actual_tokens: T; query tensors may be longer (padding), and what lies behind is neither read nor written.
            In a padded batch of a CUDA graph ``query_start_loc`` may end before T: the tokens behind it belong to no
            request, and their outputs may hold anything.
        max_query_len: the longest query, tokens.
        max_seq_len: the most keys of a request, or any bound above it (the model's length, for CUDA graphs).
        block_table_tensor: int32 ``(B, W)`` on the device, block ids of each request in order, any value behind its
            last block; None without a cache.
        slot_mapping: int64 ``(T,)`` on the device, where each token's key and value go
            (``block * block_size + offset``), -1 for nowhere; None without a cache. In cross-attention ``(S,)`` for the
            encoder's S tokens in the step that writes them, else ``(0,)``.
        causal: False where the step attends in both directions although its layers are causal (diffusion drafters).
        mm_prefix_ranges: per request the ranges of positions that attend to each other in both directions.
        block_size: tokens per block of ``block_table_tensor``; ``prepare_batch`` takes it from the table. A group
            refuses a batch of another block size than its own. None: unknown, and nothing is compared.
        num_decodes: how many of the first requests are decodes, where their query lengths do not say it: what a prefill
            has in one chunk of ``attention_chunk_size`` may be as short as a decode. None: all with short queries.
        tree_mask: bool ``(T, 1 + num_speculative_tokens)`` on the device, for layers with ``draft_tree``: whether a
            token sees token j of its request's tokens in this step (j from 0), beside the whole context. None: it sees
            those up to itself. A token sees itself, and none behind it. Rows of requests with more tokens than columns,
            which are causal prefills, and columns behind a request's last token may hold anything.
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor | None = None
    slot_mapping: Tensor | None = None
    causal: bool = True
    mm_prefix_ranges: Sequence[Ranges] | None = None
    block_size: int | None = None
    num_decodes: int | None = None
    tree_mask: Tensor | None = None

    @property
    def query_lens_cpu(self) -> Tensor:
        """int32 ``(B,)`` on the host."""
        return self.query_start_loc_cpu.diff()

    @property
    def num_computed_tokens_cpu(self) -> Tensor:
        """int32 ``(B,)`` on the host: keys that were cached before this step."""
        return self.seq_lens_cpu - self.query_lens_cpu

    def requests(self, first: int, last: int) -> CommonAttentionMetadata:
        """Return the batch of requests ``first .. last - 1`` alone, as views. No device synchronisation.

        Its tokens begin at ``query_start_loc_cpu[first]``, and its ``slot_mapping`` is cut likewise. In
        cross-attention the slots belong to the encoder's tokens: take them from the whole batch there.
        """
        if first == 0 and last == self.num_reqs:
            return self
        # numpy works on so few numbers in half the time that torch takes.
        on_host, lens = self.query_start_loc_cpu.numpy()[first : last + 1], self.seq_lens_cpu.numpy()[first:last]
        start, end = int(on_host[0]), int(on_host[-1])
        bounds_cpu = self.query_start_loc_cpu[first : last + 1]
        bounds = self.query_start_loc[first : last + 1]
        if start:
            bounds, bounds_cpu = bounds - start, torch.from_numpy(on_host - start)
        return replace(
            self,
            query_start_loc=bounds,
            query_start_loc_cpu=bounds_cpu,
            seq_lens=self.seq_lens[first:last],
            seq_lens_cpu=self.seq_lens_cpu[first:last],
            num_reqs=last - first,
            num_actual_tokens=end - start,
            max_query_len=int((on_host[1:] - on_host[:-1]).max(initial=0)),
            max_seq_len=int(lens.max(initial=0)),
            block_table_tensor=None if self.block_table_tensor is None else self.block_table_tensor[first:last],
            slot_mapping=None if self.slot_mapping is None else self.slot_mapping[start:end],
            mm_prefix_ranges=None if self.mm_prefix_ranges is None else self.mm_prefix_ranges[first:last],
            tree_mask=None if self.tree_mask is None else self.tree_mask[start:end],
            num_decodes=None if self.num_decodes is None else max(0, min(self.num_decodes, last) - first),
        )


@dataclass(slots=True)
class VarlenMetadata:
    """One prefill call of MLA on decompressed keys and values, without a cache: B requests, T queries, S keys.

    Attributes:
        query_start_loc: int32 ``(B + 1,)`` on the device; ``query_start_loc_cpu`` on the host.
        key_start_loc: int32 ``(B + 1,)`` on the device; ``key_start_loc_cpu`` on the host.
        max_query_len: the longest query.
        max_key_len: the most keys of a request.
        causal: whether a query sees only keys at or before its position. False for keys that all lie before the
            queries (cached context), so that no mask is needed but a window's.
        query_offsets_cpu: int32 ``(B,)`` on the host: position of each request's first query relative to its first
            key here; 0 for a step's own tokens. Windows, ALiBi and image ranges are measured with it.
        counts_sinks: whether attention sinks are counted in this call; they are in exactly one of the calls that
            are merged.
        mm_prefix_ranges: as in ``CommonAttentionMetadata``, relative to the first key here (and so may be negative).
    """

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    key_start_loc: Tensor
    key_start_loc_cpu: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    query_offsets_cpu: Tensor
    counts_sinks: bool
    mm_prefix_ranges: Sequence[Ranges] | None = None

    @classmethod
    def of_new_tokens(cls, common: CommonAttentionMetadata, *, causal: bool) -> VarlenMetadata:
        """Return the call in which a step's tokens attend to each other alone, image ranges left out."""
        bounds, bounds_cpu = common.query_start_loc, common.query_start_loc_cpu
        return cls(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds_cpu,
            key_start_loc=bounds,
            key_start_loc_cpu=bounds_cpu,
            max_query_len=common.max_query_len,
            max_key_len=common.max_query_len,
            causal=causal,
            query_offsets_cpu=torch.zeros_like(common.seq_lens_cpu),
            counts_sinks=True,
        )


@dataclass(slots=True)
class Split:
    """How many requests and tokens of a batch are decodes, which come first, and how many are prefills."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def check_uniform(common: CommonAttentionMetadata, query_len: int) -> None:
    """Raise BatchError for the first request with a query of another length than these graphs were captured for."""
    lens = common.query_lens_cpu
    if bool((lens != query_len).any()):
        request = int((lens != query_len).int().argmax())
        raise BatchError(
            f"request {request} has a query of {int(lens[request])} tokens: these graphs were captured for uniform "
            f"batches of {query_len}"
        )


def split_decodes_and_prefills(common: CommonAttentionMetadata, decode_threshold: int = 1) -> Split:
    """Count the leading requests whose query is at most ``decode_threshold`` tokens long; the rest are prefills.

    Where ``common.num_decodes`` is given, that many are decodes instead. Reads host copies only.

    Raises:
        BatchError: a request that counts as a decode stands behind a prefill; names both.
    """
    num_reqs, tokens, first = common.num_reqs, common.num_actual_tokens, common.num_decodes
    if first is None and common.max_query_len <= decode_threshold:
        return Split(num_reqs, 0, tokens, 0)
    bounds = common.query_start_loc_cpu.tolist()
    if first is None:
        lens = [end - start for start, end in pairwise(bounds)]
        first = next((request for request, length in enumerate(lens) if length > decode_threshold), num_reqs)
        late = next((request for request in range(first, num_reqs) if lens[request] <= decode_threshold), None)
        if late is not None:
            raise BatchError(
                f"request {late} (query of {lens[late]} tokens) is a decode behind request {first} (query "
                f"of {lens[first]} tokens), a prefill: decodes of up to {decode_threshold} tokens must come first",
                hint="order the batch with attn_select.runtime.decodes_first(query_lens, threshold)",
            )
    return Split(first, num_reqs - first, bounds[first], tokens - bounds[first])


def split_by_phase(
    common: CommonAttentionMetadata, threshold: int
) -> list[tuple[Phase, slice, CommonAttentionMetadata]]:
    """Return decodes, then prefills, each where there are tokens of them, with their tokens and their requests."""
    split = split_decodes_and_prefills(common, threshold)
    decodes, first = split.num_decodes, split.num_decode_tokens
    found: list[tuple[Phase, slice, CommonAttentionMetadata]] = []
    if first:
        found.append(("decode", slice(0, first), common.requests(0, decodes)))
    if split.num_prefills:
        found.append(("prefill", slice(first, common.num_actual_tokens), common.requests(decodes, common.num_reqs)))
    return found


def decodes_first(query_lens: Sequence[int], decode_threshold: int = 1) -> list[int]:
    """Return the order of requests with decodes (queries up to ``decode_threshold`` tokens) first, else as given."""
    decodes = [i for i, length in enumerate(query_lens) if length <= decode_threshold]
    return decodes + [i for i, length in enumerate(query_lens) if length > decode_threshold]


def causal_trees(common: CommonAttentionMetadata, columns: int) -> Tensor:
    """Return the ``tree_mask`` ``(T, columns)`` of a batch without one: every token sees those up to itself."""
    bounds, token = common.query_start_loc, torch.arange(common.num_actual_tokens, device=common.seq_lens.device)
    request = torch.searchsorted(bounds[1:], token, right=True).clamp_max_(common.num_reqs - 1)
    place = token - bounds.index_select(0, request)
    return torch.arange(columns, device=token.device) <= place[:, None]


def prefix_sums(lengths: Tensor) -> Tensor:
    """Return int32 ``(B + 1,)``: 0 and the running sums of ``(B,)`` lengths, on their device."""
    sums = lengths.new_zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, dtype=torch.int32, out=sums[1:])
    return sums
