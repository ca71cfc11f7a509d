"""``MLAAttention``: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) by both of its computation paths.

Decodes absorb ``W_UK`` into the query and ``W_UV`` into the output and read the latents alone (least memory traffic);
prefills decompress keys and values (least arithmetic). ``attn_select.runtime.mla_group`` says how prefills are chunked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, cast

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.runtime import checks, ops
from attn_select.runtime.attention import WRITTEN, GroupLayer, foreign_metadata
from attn_select.runtime.backend_faults import call
from attn_select.runtime.custom_op import current_metadata, register_layer
from attn_select.runtime.metadata import BatchError
from attn_select.runtime.mla_context import Spans
from attn_select.runtime.mla_group import MLALayerGroup
from attn_select.runtime.step_metadata import AttentionMetadata, Part
from attn_select.runtime.terms import GivenTerms, Outputs, Terms, check_float
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


class MLAAttention(GroupLayer):
    """One MLA layer of a group, for inference: no gradient flows through it.

    Args:
        group: the group of layers that it belongs to.
        kv_b_proj: ``(num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)``, the checkpoint's weight that
            decompresses a latent (``kv_b_proj.weight``); head by head the rows of ``W_UK``, then of ``W_UV``. Where it
            lies on the group's device in the layer's dtype, the layer reads this memory: both computation paths, and
            captured graphs, follow what is written there later. Else the layer has a converted copy, which follows
            nothing. ``layer.kv_b_proj`` is what is read in either case: ``layer.kv_b_proj.copy_(weight)`` updates it.
        scale: factor on ``q . k``; None: ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``.
        alibi_slopes: ``(num_heads,)``; required with ``config.alibi``, refused without.
        sinks: ``(num_heads,)``; required with ``config.sinks``, refused without.
        scales: scales of an FP8 cache or of FP8 queries, ``k`` for the latent; None: all are 1.
        layer_name: unique among the layers that exist; empty: a new name is made.

    Raises:
        ConfigError: the group is not of MLA layers; the weight has the wrong shape; or what ``Terms.of`` raises it for.
    """

    def __init__(
        self,
        group: MLALayerGroup,
        kv_b_proj: Tensor,
        *,
        layer_name: str = "",
        **terms: Unpack[GivenTerms],
    ) -> None:
        if not isinstance(group, MLALayerGroup):
            raise ConfigError("the group's layers are not MLA: make them with Attention", fields=["kv_lora_rank"])
        config = group.config
        super().__init__(group, Terms.of(config, group.device, checked=group.checked, **terms))
        self.rank = cast(int, config.kv_lora_rank)
        self.nope, self.rope = cast(int, config.qk_nope_head_dim), cast(int, config.qk_rope_head_dim)
        self.value_size, self.heads = cast(int, config.v_head_dim), config.num_heads
        dtype = PLAIN_DTYPES[config.dtype]
        self._accepted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "query": ((self.heads, self.nope + self.rope), dtype),
            "kv_c_normed": ((self.rank,), dtype),
            "k_pe": ((self.rope,), dtype),
            "output": ((self.heads, self.value_size), dtype),
            "topk_indices": ((cast(int, config.sparse_top_k),), torch.int32),
            "output_lse": ((self.heads,), torch.float32),
        }
        self._absorb(kv_b_proj)
        self._in_parts = group.layer_in_parts(MLAAttention, self.terms)
        self._make_impls()
        # Both phases' backends read one cache, so the first that has it writes for both.
        readers = [phase for phase in self.impls if group.backends[phase].context.kv_layout is not None]
        self._writer: Phase | None = readers[0] if readers else None
        self.layer_name = register_layer(self, layer_name)

    def _absorb(self, kv_b_proj: Tensor) -> None:
        """Keep the decompressing weight: in no second form, so that writes to it reach both sides of decode."""
        check_float("kv_b_proj", kv_b_proj)
        wanted = (self.heads * (self.nope + self.value_size), self.rank)
        if tuple(kv_b_proj.shape) != wanted:
            text = f"kv_b_proj of shape {tuple(kv_b_proj.shape)}: accepted is {wanted}"
            raise ConfigError(text, fields=["kv_b_proj"])
        weight = kv_b_proj.detach().to(self.group.device, PLAIN_DTYPES[self.group.config.dtype])
        self.register_buffer("kv_b_proj", weight, persistent=False)
        self._viewed: Tensor | None = None

    group: MLALayerGroup
    kv_b_proj: Tensor
    """``(num_heads * (P + V), R)``."""
    _views: tuple[Tensor, Tensor]

    def _sides(self) -> tuple[Tensor, Tensor]:
        """Return ``W_UK (H, P, R)``, query into latent, and ``W_UV (H, R, V)``, latent into output: views."""
        # They are made once for each tensor that ``kv_b_proj`` is: ``Module.to`` may put another one there.
        weight = self.kv_b_proj
        if self._viewed is not weight:
            by_head = weight.view(self.heads, self.nope + self.value_size, self.rank)
            self._views = by_head[:, : self.nope], by_head[:, self.nope :].transpose(1, 2)
            self._viewed = weight
        return self._views

    def forward(
        self,
        query: Tensor,
        kv_c_normed: Tensor | None,
        k_pe: Tensor | None,
        kv_cache: Tensor | None = None,
        attn_metadata: AttentionMetadata | None = None,
        output: Tensor | None = None,
        topk_indices: Tensor | None = None,
        output_lse: Tensor | None = None,
    ) -> Tensor:
        """Write the step's latents into the cache, attend, and return the output.

        Args:
            query: ``(T', num_heads, qk_nope_head_dim + qk_rope_head_dim)``, rope applied to the last part.
            kv_c_normed: ``(T', kv_lora_rank)``, normalised latents.
            k_pe: ``(T', qk_rope_head_dim)``, rope applied.
            kv_cache: one layer's cache (``group.allocate_kv_cache``).
            attn_metadata: what ``group.build`` returned; None: the metadata of the forward context. Must be None under
                ``torch.compile``.
            output: ``(T', num_heads, v_head_dim)``, written; None makes one. Rows behind ``num_actual_tokens`` are left
                alone.
            topk_indices: int32 ``(T', sparse_top_k)``, with sparse MLA: physical slots, -1 is padding, anywhere; over
                several ranks the scheduler's, the same on all of them.
            output_lse: float32 ``(T', num_heads)``, written if given; only for plans that return the LSE.

        Raises:
            BatchError: before a kernel starts: another group built the metadata, or an argument has a shape or dtype
                (in checked mode also device, strides, block ids, scales) that is not accepted.
        """
        if not isinstance(query, Tensor):
            raise BatchError(f"query is a {type(query).__name__}: accepted is a tensor")
        if output is None:
            output = query.new_empty(query.shape[0], self.heads, self.value_size)
        if torch.compiler.is_compiling():
            if attn_metadata is not None or output_lse is not None:
                raise BatchError(
                    "under torch.compile attn_metadata and output_lse must be None",
                    hint="run the compiled model inside `with forward_context({group: group.build(common)})`",
                )
            torch.ops.attn_select.mla_attention(
                query, kv_c_normed, k_pe, topk_indices, kv_cache, output, self.layer_name
            )
            return output
        if torch.is_grad_enabled():  # matmuls with ``out=`` have no gradient
            with torch.no_grad():
                extras = (output, topk_indices, output_lse)
                return self.forward(query, kv_c_normed, k_pe, kv_cache, attn_metadata, *extras)
        metadata = current_metadata(self.group, self.layer_name) if attn_metadata is None else attn_metadata
        given = (query, kv_c_normed, k_pe, output, topk_indices, output_lse)
        self._check(metadata, kv_cache, dict(zip(self._accepted, given, strict=True)))
        kv_c, rope, cache = cast(tuple[Tensor, ...], (kv_c_normed, k_pe, kv_cache))
        self._write(kv_c, rope, cache, cast(Tensor, metadata.slot_mapping))
        if topk_indices is not None:
            topk_indices = self.group.own_slots(topk_indices[: metadata.num_actual_tokens])
        for part in metadata.parts:
            rows = part.rows
            outputs = Outputs(_rows(output, rows), None if output_lse is None else _rows(output_lse, rows))
            if part.phase == "decode" or self.group.config.sparse:
                chosen = None if topk_indices is None else _rows(topk_indices, rows)
                self._mqa(part, _rows(query, rows), cache, outputs, chosen)
            else:
                own = [_rows(tensor, rows) for tensor in (query, kv_c, rope)]
                self._mha(part, own, cache, outputs)
        return output

    def dummy_inputs(self, tokens: int) -> dict[str, Tensor]:
        """As ``Attention.dummy_inputs``; with sparse MLA every token attends to the cache's first slot."""
        names = ("query", "kv_c_normed", "k_pe", *(["topk_indices"] if self.group.config.sparse else []))
        return {
            name: torch.zeros(tokens, *shape, dtype=dtype, device=self.group.device)
            for name, (shape, dtype) in self._accepted.items()
            if name in names
        }

    def _write(self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write the step's latents, by the backend that reads them or, if there is none, by the shared operation."""
        group = self.group
        if self._writer is None:
            new = (kv_c_normed[: len(slot_mapping)], k_pe[: len(slot_mapping)])
            ops.concat_and_cache_mla(*new, kv_cache, slot_mapping, group.kv_layout, group.config, self.terms.scales)
            return
        spec, update = group.backends[self._writer].spec, self.impls[self._writer].do_kv_cache_update
        view = self._cache_for(self._writer, kv_cache)
        call(spec, "do_kv_cache_update()", "", update, kv_c_normed, k_pe, view, slot_mapping)

    def _mqa(self, part: Part, query: Tensor, kv_cache: Tensor, outputs: Outputs, indices: Tensor | None) -> None:
        impl = self.impls[part.phase]
        w_uk, w_uv = self._sides()
        nope, rope = query.split_with_sizes([self.nope, self.rope], dim=-1)
        view, absorbed = self._cache_for(part.phase, kv_cache), None
        # Kernels that take the parts save the copy of the rope part; in parts (ranks) the joined query is gathered
        # whole.
        if impl.takes_query_parts and self._in_parts is None and _aligned(rope):
            latent_query = query.new_empty(query.shape[0], self.heads, self.rank)
        else:
            absorbed = query.new_empty(query.shape[0], self.heads, self.rank + self.rope)
            latent_query, rope_query = absorbed.split_with_sizes([self.rank, self.rope], dim=-1)
            rope_query.copy_(rope)
        _project(nope, w_uk, latent_query, part.spans)
        if self._in_parts is not None:
            self._in_parts.forward(
                absorbed,
                lambda gathered, latents: self._latent(part, gathered, view, latents, indices),
                lambda latent, projected: _project(latent, w_uv, projected, part.spans),
                outputs,
            )
            return
        # ``empty_like`` alone would copy the strides of a view.
        latent = torch.empty_like(latent_query, memory_format=torch.contiguous_format)
        given: Any = (latent_query, rope) if absorbed is None else absorbed
        # A kernel may return memory of its own: go on with that, not with what was given to it.
        latent = self._latent(part, given, view, Outputs(latent, outputs.lse), indices)
        _project(latent, w_uv, outputs.output, part.spans)

    def _latent(self, part: Part, query: Any, view: Tensor, latents: Outputs, indices: Tensor | None) -> Tensor:
        """Return the latent output of a part, as its backend computes it."""
        spec, run = self.group.backends[part.phase].spec, self.impls[part.phase].forward_mqa
        found: Tensor = call(spec, "forward_mqa()", WRITTEN, run, query, view, part.metadata, latents, indices)
        return found

    def _mha(self, part: Part, own: Sequence[Tensor], kv_cache: Tensor, outputs: Outputs) -> None:
        group, (query, kv_c, k_pe) = self.group, own
        output, lse = outputs.output, outputs.lse
        # The chunks are merged by LSE, whether the caller wants one or not.
        if lse is None and part.chunks:
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        self._dense(part, query, self._decompressed(kv_c, k_pe, part.spans), part.metadata, Outputs(output, lse))
        for chunk in part.chunks:
            assert lse is not None
            kv_c, k_pe = group.load_chunk(chunk, kv_cache, self.terms.scales).split_with_sizes(
                [self.rank, self.rope], dim=1
            )
            merged, merged_lse = output[chunk.rows], lse[chunk.rows]
            some, some_lse = torch.empty_like(merged), torch.empty_like(merged_lse)
            keys_values = self._decompressed(kv_c, k_pe, chunk.spans)
            self._dense(part, query[chunk.rows], keys_values, chunk.metadata, Outputs(some, some_lse))
            del keys_values  # frees their memory for the next chunk
            ops.merge_attn_states(merged, some, some_lse, merged, merged_lse, merged_lse)

    def _dense(
        self, part: Part, query: Tensor, keys_values: tuple[Tensor, Tensor], metadata: Any, outputs: Outputs
    ) -> None:
        """Attend from a part's prefills to decompressed keys and values, as its backend does."""
        spec, run = self.group.backends[part.phase].spec, self.impls[part.phase].forward_mha
        call(spec, "forward_mha()", WRITTEN, run, query, *keys_values, metadata, outputs)

    def _decompressed(self, kv_c: Tensor, k_pe: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        """Return keys ``(S, H, P + Pr)`` and values ``(S, H, V)``."""
        both = kv_c.new_empty(kv_c.shape[0], self.kv_b_proj.shape[0])
        # Matmuls of other sizes may round otherwise: with ``batch_invariant`` each request has one of its own.
        for span in spans:
            torch.mm(kv_c[span], self.kv_b_proj.t(), out=both[span])
        both = both.view(-1, self.heads, self.nope + self.value_size)
        keys = both.new_empty(both.shape[0], self.heads, self.nope + self.rope)
        keys[..., : self.nope] = both[..., : self.nope]
        keys[..., self.nope :] = k_pe.unsqueeze(1)
        return keys, both[..., self.nope :]

    def _check(self, metadata: AttentionMetadata, kv_cache: Tensor | None, given: dict[str, Tensor | None]) -> None:
        group, tokens, wanted = self.group, metadata.num_actual_tokens, self.group.config.sparse
        if getattr(metadata, "group", None) is not group:
            raise foreign_metadata(f"layer {self.layer_name!r}: attn_metadata", metadata)
        for name, (shape, dtype) in self._accepted.items():
            tensor = given[name]
            if name == "topk_indices" and (tensor is not None) != wanted:
                seen = "missing" if tensor is None else "given"
                raise BatchError(f"topk_indices {seen}, but sparse_top_k = {group.config.sparse_top_k}")
            if tensor is not None:
                if tensor.shape[1:] != shape or tensor.dtype != dtype or tensor.shape[0] < tokens:
                    checks.check_rows(name, tensor, shape, dtype, tokens)
            elif name in ("kv_c_normed", "k_pe"):
                raise BatchError(f"{name} is None: accepted is (at least {tokens} tokens, {shape[0]})")
        if kv_cache is None or (kv_cache.shape, kv_cache.dtype) != self._cache_seen:
            self._check_cache(kv_cache)
        if self._silent and given["output_lse"] is not None:
            raise BatchError(f"output_lse given, but {' and '.join(self._silent)} returns no LSE")
        if group.checked:
            group.check_contents(self.terms.scales, given, kv_cache, metadata.common)


def _aligned(tensor: Tensor) -> bool:
    """Whether kernels can read each row of the last dimension in pieces of 16 bytes."""
    *strides, last = tensor.stride()
    size = tensor.element_size()
    return last == 1 and tensor.data_ptr() % 16 == 0 and not any([stride * size % 16 for stride in strides])


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    return tensor if rows.start == 0 and rows.stop == tensor.shape[0] else tensor[rows]


_FEW_TOKENS = 16
"""On a CPU oneDNN copies a transposed bfloat16 weight in every call, which takes ten times as long as the product with
few tokens; to copy these and their result is cheaper then."""


def _project(tokens: Tensor, weight: Tensor, out: Tensor, spans: Spans) -> None:
    """Write ``(T, H, D)`` times ``(H, D, E)`` into ``(T, H, E)``, whatever its strides."""
    left, out = tokens.transpose(0, 1), out.transpose(0, 1)
    slow = weight.stride(2) != 1 and weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
    for span in spans:
        some, target = (left, out) if len(spans) == 1 else (left[:, span], out[:, span])
        if slow and some.shape[1] <= _FEW_TOKENS:
            target.copy_(torch.bmm(weight.mT, some.mT).mT)
        else:
            torch.bmm(some, weight, out=target)
