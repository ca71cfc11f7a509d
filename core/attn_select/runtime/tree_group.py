"""``DraftTreeGroup``: trees of drafts on kernels that take no mask, in two parts that are merged by log-sum-exp.

The context of a decode is the same for all of its drafts, so the kernel attends to it without a mask. The step's own
tokens, a few per request, are attended to in torch, under the tree's mask (as SGLang's tree verification splits prefix
and tree). Prefills and steps without a ``tree_mask`` run on the kernel as always.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.decide.selection import Selection
from attn_select.layer.config import CudaGraphLevel
from attn_select.layer.dtypes import is_quantized
from attn_select.runtime import ops
from attn_select.runtime.group import AttentionGroup
from attn_select.runtime.kv_cache import key_value_views
from attn_select.runtime.layer_group import LayerGroup
from attn_select.runtime.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from attn_select.runtime.static_buffers import StaticBuffers
from attn_select.runtime.step_metadata import AttentionMetadata
from attn_select.runtime.terms import Inputs, Outputs, Terms
from attn_select.runtime.torch_dtypes import FP8_DTYPES


@dataclass(slots=True)
class DraftTreeMetadata(AttentionMetadata):
    """One step's batch."""

    # What the kernel computes alone: prefills, or the whole step where it has no tree; None if there is none.
    plain: AttentionMetadata | None = None
    # The decodes against what was cached before this step; None where nothing was.
    context: AttentionMetadata | None = None
    num_decode_tokens: int = 0
    # int64 ``(num_decode_tokens, M)``, the tokens of this step that belong to the token's request, and bool: which of
    # them it sees. Columns behind the request's last token hold any token.
    own: Tensor | None = None
    visible: Tensor | None = None


class DraftTreeGroup(LayerGroup):
    """The group of layers with ``draft_tree`` whose kernels take no mask; arguments are ``AttentionGroup``'s."""

    def __init__(self, selection: Selection, *arguments: Any, cuda_graphs: bool = False, **options: Any) -> None:
        fields = {"draft_tree": False, "output_quantization": "none"}
        whole: Selection[Any] = selection
        part = replace(whole, config=whole.config.model_copy(update=fields))
        made: dict[str, Any] = {**options, "cuda_graphs": cuda_graphs, "checked": False}
        # Two groups, since both kinds of batches are in one step: each has builders, and so buffers, of its own.
        self.plain = AttentionGroup(part, *arguments, **made)
        self.context = AttentionGroup(part, *arguments, **made)
        parts = (self.plain, self.context)
        super().__init__(selection, None, self.plain.capacity, cuda_graphs=cuda_graphs, parts=parts)
        requests, columns = self.capacity.max_num_seqs, self.reorder_batch_threshold
        self._static = StaticBuffers(self.device, captured=cuda_graphs)
        self._static.reserve("lens", requests)
        self._static.reserve("own", requests * columns, columns, dtype=torch.int64)
        self._static.reserve("visible", requests * columns, columns, dtype=torch.bool)

    def build_step(
        self, common: CommonAttentionMetadata, prefix: int = 0, fast: bool = False, captured: bool = False
    ) -> DraftTreeMetadata:
        """As ``LayerGroup.build_step``. Where a tree is in the batch, ``prefix`` changes nothing."""
        if common.tree_mask is None or "decode" not in self.backends:
            plain = self.plain.build_step(replace(common, tree_mask=None), prefix, fast, captured)
            return self._metadata_of(common, plain)
        split = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        decodes, prefills = common.requests(0, split.num_decodes), common.requests(split.num_decodes, common.num_reqs)
        beside = None
        if split.num_prefills:
            beside = self.plain.build_step(replace(prefills, tree_mask=None), 0, fast, captured)
        if not split.num_decodes:
            return self._metadata_of(common, beside)
        # Whether there is any context must not change from a captured step to its replays.
        context = None
        if self.cuda_graphs or captured or int(decodes.num_computed_tokens_cpu.max()) > 0:
            context = self.context.build_step(self._context_of(decodes), 0, fast, captured)
        own, visible = _own_tokens(decodes)
        own, visible = self._static.hold("own", own), self._static.hold("visible", visible)
        trees = {"num_decode_tokens": decodes.num_actual_tokens, "own": own, "visible": visible}
        return self._metadata_of(common, beside, context, **trees)

    def _context_of(self, decodes: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return decodes as a batch over the keys that were cached before this step, all of them seen."""
        lens = (decodes.seq_lens - decodes.query_start_loc.diff()).clamp_min_(0)
        return replace(
            decodes,
            seq_lens=self._static.hold("lens", lens),
            seq_lens_cpu=decodes.num_computed_tokens_cpu.clamp_min(0),
            causal=False,
            tree_mask=None,
        )

    def _metadata_of(
        self,
        common: CommonAttentionMetadata,
        plain: AttentionMetadata | None,
        context: AttentionMetadata | None = None,
        **trees: Any,
    ) -> DraftTreeMetadata:
        # Layers compute in parts of their own: of these only the number is read (``Attention._check_extras``).
        own = context or plain
        parts = () if own is None else own.parts
        tokens, slots = common.num_actual_tokens, common.slot_mapping
        return DraftTreeMetadata(self, common, tokens, slots, parts, plain=plain, context=context, **trees)

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Which batches can be captured: decodes, as the kernel's level for their contexts allows."""
        level = self.context.cudagraph_support
        return "UNIFORM_BATCH" if level == "ALWAYS" else level

    @cached_property
    def reorder_batch_threshold(self) -> int:
        """Decodes, whose drafts form trees, come first."""
        return self.config.max_decode_query_len

    def layer_in_parts(self, layer: type[Any], terms: Terms) -> DraftTreeAttention:
        """Return what computes one layer of this group."""
        return DraftTreeAttention(self, layer, terms)


def _own_tokens(decodes: CommonAttentionMetadata) -> tuple[Tensor, Tensor]:
    """Return the tokens of each token's request, int64 ``(T, M)``, and which of them it sees."""
    assert decodes.tree_mask is not None
    bounds, count, columns = decodes.query_start_loc, decodes.num_actual_tokens, decodes.tree_mask.shape[1]
    token = torch.arange(count, device=bounds.device)
    request = torch.searchsorted(bounds[1:], token, right=True).clamp_max_(decodes.num_reqs - 1)
    first, end = bounds.index_select(0, request)[:, None], bounds.index_select(0, request + 1)[:, None]
    place = torch.arange(columns, device=bounds.device)
    own = first + place
    # Behind the keys that there are, a request has padding: its first tokens stand before position 0.
    # place >= lacking leaves out tokens without a key; own <= token leaves out drafts behind the token, whatever the
    # mask.
    lacking = (end - first - decodes.seq_lens.index_select(0, request)[:, None]).clamp_min(0)
    there = (own < end) & (place >= lacking) & (own <= token[:, None])
    return own.clamp_max(count - 1).long(), decodes.tree_mask[:count] & there


class DraftTreeAttention:
    """Computes one layer of a ``DraftTreeGroup``; ``layer`` is the class of plain layers."""

    def __init__(self, group: DraftTreeGroup, layer: type[Any], terms: Terms) -> None:
        self.group, self.terms = group, terms
        self.plain, self.context = (
            layer(part, caller_writes=True, **terms.given(part.config)) for part in (group.plain, group.context)
        )

    def merged(self, inputs: Inputs, metadata: DraftTreeMetadata, outputs: Outputs) -> None:
        """Compute the parts and write what they give together, in the query's dtype."""
        query, key, value, kv_cache = inputs
        tokens, decodes = metadata.num_actual_tokens, metadata.num_decode_tokens
        if not decodes:
            if metadata.plain is not None:
                self.plain.forward(*inputs, metadata.plain, outputs.output, outputs.lse)
            return
        if key is not None and value is not None:
            # All tokens are written first: the trees' own tokens are read back from the cache, as it rounds them.
            self.plain.write(key, value, kv_cache, metadata.slot_mapping)
        first, rest = slice(0, decodes), slice(decodes, tokens)
        if metadata.plain is not None:
            plain = outputs.rows(rest)
            self.plain.forward(query[rest], None, None, kv_cache, metadata.plain, plain.output, plain.lse)
        trees = outputs.rows(first)
        output, lse = trees.output, trees.lse
        own, own_lse = self._own(query[first], kv_cache, metadata)
        own = own.to(output.dtype)
        if metadata.context is None:
            output.copy_(own)
            if lse is not None:
                lse.copy_(own_lse)
            return
        part, part_lse = torch.empty_like(output), torch.empty_like(own_lse)
        self.context.forward(query[first], None, None, kv_cache, metadata.context, part, part_lse)
        ops.merge_attn_states(output, part, part_lse, own, own_lse, lse)

    def _own(self, query: Tensor, kv_cache: Tensor, metadata: DraftTreeMetadata) -> tuple[Tensor, Tensor]:
        """Attend to the step's own tokens; return output ``(T, H, Dv)`` and LSE ``(T, H)``, sinks counted if alone."""
        config, terms, own, visible = self.group.config, self.terms, metadata.own, metadata.visible
        assert own is not None
        assert visible is not None
        assert metadata.slot_mapping is not None
        plan = self.group.backends["decode"].context.plans["decode"]
        query = query.float()
        if is_quantized(plan.query_dtype):
            dtype = FP8_DTYPES[plan.query_dtype]
            query = ops.quantize_fp8(query, terms.scales.q, dtype).float() * terms.scales.q
        slots = metadata.slot_mapping[: len(query)].clamp_min(0)
        views = key_value_views(kv_cache, cast(str, self.group.kv_layout), config)
        keys, values = (
            _read(view, slots, scale)[own] for view, scale in zip(views, (terms.scales.k, terms.scales.v), strict=True)
        )
        values = values.masked_fill(~visible[..., None, None], 0)  # padding has no slot, and 0 * NaN is NaN
        group = config.num_heads // config.num_kv_heads
        grouped = query.view(len(query), config.num_kv_heads, group, -1)
        scores = torch.einsum("tkgd,tmkd->tkgm", grouped, keys).flatten(1, 2) * terms.scale
        if terms.logits_soft_cap is not None:
            scores = terms.logits_soft_cap * torch.tanh(scores / terms.logits_soft_cap)
        scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(-1)
        # With a context the kernel counts the sinks in its part; they may be counted once.
        if terms.sinks is not None and metadata.context is None:
            lse = torch.logaddexp(lse, terms.sinks.float())
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
        weights = weights.view(len(query), config.num_kv_heads, group, -1)
        return torch.einsum("tkgm,tmkd->tkgd", weights, values).flatten(1, 2), lse


def _read(view: Tensor, slots: Tensor, scale: Tensor) -> Tensor:
    """Return keys or values float32 ``(N, num_kv_heads, size)`` at slots of ``(num_blocks, block_size, ...)``."""
    size, fp8 = view.shape[1], view.dtype in FP8_DTYPES.values()
    stored = (view.view(torch.uint8) if fp8 else view)[slots // size, slots % size]  # torch indexes no FP8
    return stored.view(view.dtype).float() * scale.reshape(-1, 1) if fp8 else stored.float()
