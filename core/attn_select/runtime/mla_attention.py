"""``MLAAttention``: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) by both of its computation paths.

Decodes absorb ``W_UK`` into the query and ``W_UV`` into the output and read the latents alone (least memory traffic);
prefills decompress keys and values (least arithmetic). ``attn_select.runtime.mla_group`` says how prefills are chunked.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from attn_select.errors import ConfigError
from attn_select.runtime import checks, ops
from attn_select.runtime.attention import layer_scales, per_head
from attn_select.runtime.backend import MLAAttentionImpl
from attn_select.runtime.custom_op import current_metadata, register_layer
from attn_select.runtime.metadata import BatchError
from attn_select.runtime.mla_group import ContextChunk, MLAAttentionGroup, MLAMetadata
from attn_select.runtime.scales import Scales
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


class MLAAttention(nn.Module):
    """One MLA layer of a group.

    Args:
        group: its kind.
        kv_b_proj: ``(num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank)``, the checkpoint's weight that
            decompresses a latent (``kv_b_proj.weight``); head by head the rows of ``W_UK``, then of ``W_UV``.
        scale: factor on ``q . k``; None: ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``.
        alibi_slopes, sinks: ``(num_heads,)``, with ``config.alibi`` and ``config.sinks`` and only then.
        scales: of an FP8 cache or query; the latent's is ``k``; None: all 1.
        layer_name: unique; None gives one.

    Raises:
        ConfigError: a weight, slopes, sinks or scales have the wrong shape, or are missing or unwanted.
    """

    def __init__(
        self,
        group: MLAAttentionGroup,
        kv_b_proj: Tensor,
        *,
        scale: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        scales: Scales | None = None,
        layer_name: str = "",
    ) -> None:
        super().__init__()
        config = group.config
        self.group = group
        self.rank = cast(int, config.kv_lora_rank)
        self.nope, self.rope = cast(int, config.qk_nope_head_dim), cast(int, config.qk_rope_head_dim)
        self.value_size, self.heads = cast(int, config.v_head_dim), config.num_heads
        self.scale = (self.nope + self.rope) ** -0.5 if scale is None else scale
        self.scales = layer_scales(group, scales)
        self._dtype = PLAIN_DTYPES[config.dtype]
        self._absorb(kv_b_proj)
        options: dict[str, Any] = {
            "scale": self.scale,
            "alibi_slopes": per_head("alibi_slopes", alibi_slopes, config.alibi, group, torch.float32),
            "sinks": per_head("sinks", sinks, config.sinks, group, None),
        }
        made = {id(s): cast(MLAAttentionImpl, s.backend.get_impl_cls()(s.context, **options)) for s in group.backends}
        self.impls = {phase: made[id(served)] for phase, served in group.served.items()}
        self.layer_name = register_layer(self, layer_name)

    def _absorb(self, kv_b_proj: Tensor) -> None:
        """Keep the decompressing weight once for prefill, and turned for both sides of decode."""
        wanted = (self.heads * (self.nope + self.value_size), self.rank)
        if tuple(kv_b_proj.shape) != wanted:
            text = f"kv_b_proj of shape {tuple(kv_b_proj.shape)}: accepted is {wanted}"
            raise ConfigError(text, fields=["kv_b_proj"])
        weight = kv_b_proj.detach().to(self.group.device, self._dtype)
        by_head = weight.view(self.heads, self.nope + self.value_size, self.rank)
        self.register_buffer("kv_b_proj", weight, persistent=False)
        self.register_buffer("w_uk_t", by_head[:, : self.nope].contiguous(), persistent=False)
        self.register_buffer("w_uv", by_head[:, self.nope :].transpose(1, 2).contiguous(), persistent=False)

    kv_b_proj: Tensor
    """``(num_heads * (P + V), R)``."""
    w_uk_t: Tensor
    """``(num_heads, P, R)``: query into latent."""
    w_uv: Tensor
    """``(num_heads, R, V)``: latent into output."""

    def forward(
        self,
        query: Tensor,
        kv_c_normed: Tensor | None,
        k_pe: Tensor | None,
        kv_cache: Tensor | None = None,
        attn_metadata: MLAMetadata | None = None,
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
            attn_metadata: what ``group.build`` returned; None takes the forward context's. Under ``torch.compile`` it
                must be the forward context's.
            output: ``(T', num_heads, v_head_dim)``, written; None makes one. Rows behind ``num_actual_tokens`` are left
                alone.
            topk_indices: int32 ``(T', sparse_top_k)``, with sparse MLA: physical slots, negative ones are padding.
            output_lse: float32 ``(T', num_heads)``, written where given; for plans that return the LSE.

        Raises:
            BatchError: an argument's shape or dtype (in checked mode also device, strides, block ids, scales) does not
                fit; named with what is accepted, before a kernel starts.
        """
        if output is None:
            output = query.new_empty(query.shape[0], self.heads, self.value_size)
        if torch.compiler.is_compiling():
            if attn_metadata is not None or output_lse is not None:
                raise BatchError("under torch.compile the metadata comes from forward_context, and no LSE is returned")
            torch.ops.attn_select.mla_attention(
                query, kv_c_normed, k_pe, topk_indices, kv_cache, output, self.layer_name
            )
            return output
        metadata = attn_metadata or current_metadata(self.group, self.layer_name)
        self._check(query, kv_c_normed, k_pe, kv_cache, metadata, output, topk_indices)
        assert kv_c_normed is not None
        assert k_pe is not None
        assert kv_cache is not None
        writer = self.impls.get("decode") or self.impls["prefill"]
        writer.do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, metadata.slot_mapping)
        decodes, tokens = metadata.num_decode_tokens, metadata.num_actual_tokens
        for rows, part, phase in (
            (slice(0, decodes), metadata.decode, "decode"),
            (slice(decodes, tokens), metadata.prefill, "prefill"),
        ):
            if part is None:
                continue
            lse = None if output_lse is None else output_lse[rows]
            if phase == "decode" or self.group.config.sparse:
                chosen = None if topk_indices is None else topk_indices[rows]
                impl = self.impls["decode" if phase == "decode" else "prefill"]
                self._mqa(impl, query[rows], kv_cache, part, output[rows], lse, chosen)
            else:
                self._mha(query[rows], kv_c_normed[rows], k_pe[rows], kv_cache, part, output[rows], lse)
        return output

    def run(self, arguments: tuple[Tensor | None, ...], kv_cache: Tensor | None, output: Tensor) -> None:
        """Compute the layer for ``torch.ops.attn_select.mla_attention``."""
        query, kv_c_normed, k_pe, topk_indices = arguments
        assert query is not None
        self.forward(query, kv_c_normed, k_pe, kv_cache, None, output, topk_indices)

    def _mqa(
        self,
        impl: MLAAttentionImpl,
        query: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
        output_lse: Tensor | None,
        topk_indices: Tensor | None,
    ) -> None:
        tokens = query.shape[0]
        absorbed = query.new_empty(tokens, self.heads, self.rank + self.rope)
        # (H, T, P) x (H, P, R), written where the kernel reads it.
        absorbed[..., : self.rank].copy_(
            torch.bmm(query[..., : self.nope].transpose(0, 1), self.w_uk_t).transpose(0, 1)
        )
        absorbed[..., self.rank :].copy_(query[..., self.nope :])
        latent = query.new_empty(tokens, self.heads, self.rank)
        impl.forward_mqa(self, absorbed, kv_cache, metadata, latent, output_lse, topk_indices)
        output.copy_(torch.bmm(latent.transpose(0, 1), self.w_uv).transpose(0, 1))

    def _mha(
        self,
        query: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        impl = self.impls["prefill"]
        lse = output_lse
        if lse is None and metadata.chunks:
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        impl.forward_mha(self, query, *self._decompressed(kv_c_normed, k_pe), metadata.new, output, lse)
        for chunk in metadata.chunks:
            latents = self._gathered(chunk, kv_cache, metadata.block_table)
            keys, values = self._decompressed(latents[:, : self.rank], latents[:, self.rank :])
            part = torch.empty_like(output)
            part_lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            impl.forward_mha(self, query, keys, values, chunk.metadata, part, part_lse)
            assert lse is not None
            ops.merge_attn_states(output, part, part_lse, output, lse, lse)

    def _gathered(self, chunk: ContextChunk, kv_cache: Tensor, block_table: Tensor) -> Tensor:
        """Return a chunk's latents ``(num_tokens, R + Pr)`` in the compute dtype, in the group's workspace."""
        group = self.group
        size = group.kernel_block_size or group.block_size
        assert size is not None
        ops.gather_cache_mla(
            kv_cache,
            group.workspace,
            block_table,
            chunk.starts,
            chunk.start_loc,
            chunk.num_tokens,
            size,
            group.config,
            self.scales,
        )
        return group.workspace[: chunk.num_tokens]

    def _decompressed(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys ``(S, H, P + Pr)`` and values ``(S, H, V)``."""
        both = torch.nn.functional.linear(kv_c, self.kv_b_proj).view(-1, self.heads, self.nope + self.value_size)
        keys = both.new_empty(both.shape[0], self.heads, self.nope + self.rope)
        keys[..., : self.nope] = both[..., : self.nope]
        keys[..., self.nope :] = k_pe.unsqueeze(1)
        return keys, both[..., self.nope :]

    def _check(
        self,
        query: Tensor,
        kv_c_normed: Tensor | None,
        k_pe: Tensor | None,
        kv_cache: Tensor | None,
        metadata: MLAMetadata,
        output: Tensor,
        topk_indices: Tensor | None,
    ) -> None:
        tokens, group = metadata.num_actual_tokens, self.group
        checks.check_rows("query", query, (self.heads, self.nope + self.rope), self._dtype, tokens)
        checks.check_rows("output", output, (self.heads, self.value_size), None, tokens)
        for name, tensor, size in (("kv_c_normed", kv_c_normed, self.rank), ("k_pe", k_pe, self.rope)):
            if tensor is None:
                raise BatchError(f"{name} is None: accepted is (at least {tokens} tokens, {size})")
            checks.check_rows(name, tensor, (size,), self._dtype, tokens)
        if kv_cache is None:
            checks.check_cache(kv_cache, group.kv_layout or "", group.config, group.device)
        top_k = group.config.sparse_top_k
        if (topk_indices is None) != (top_k is None):
            seen = "missing" if topk_indices is None else "given"
            raise BatchError(f"topk_indices {seen}, but sparse_top_k = {top_k}")
        if topk_indices is not None and top_k is not None:
            checks.check_rows("topk_indices", topk_indices, (top_k,), torch.int32, tokens)
        if group.checked:
            named = {"query": query, "kv_c_normed": kv_c_normed, "k_pe": k_pe, "output": output}
            checks.check_contents(group, self.scales, named, kv_cache, metadata.common)
