"""Layers of multi-head latent attention, on attn-select's kernels in SGLang.

SGLang asks a model's layers for two kinds of attention. ``attn_mqa`` attends over the cached latents with an absorbed
query: here the decodes. ``attn_mha`` attends to keys and values that SGLang has decompressed: to a prompt's new tokens,
then, where a prefix is cached, to one chunk of it after the other, and SGLang merges the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from torch import Tensor

from attn_select.layer.layouts import MLA
from attn_select.runtime import BatchError, CommonAttentionMetadata, LayerGroup, Outputs, Terms, VarlenMetadata
from attn_select.runtime.metadata import prefix_sums
from attn_select_sglang.kernels.backend import Built, OwnAttnBackend
from attn_select_sglang.kernels.batch import common_of
from attn_select_sglang.kernels.limits import mla_layers
from attn_select_sglang.names import OWN_PREFIX


def _method(attention: Any, forward_batch: Any) -> AttnForwardMethod:
    """Tell SGLang's MLA models how to call these kernels: prompts decompressed, decodes absorbed."""
    decodes = forward_batch.forward_mode.is_decode_or_idle()
    return AttnForwardMethod.MLA if decodes else AttnForwardMethod.MHA_CHUNKED_KV


@dataclass(slots=True)
class Prompts:
    """A step of prompts for one group."""

    common: CommonAttentionMetadata
    # The call of the prompts' new tokens, and the prefill backend's metadata of it.
    new: VarlenMetadata
    built: Any
    # Its metadata of the chunks of cached prefixes, by their number; SGLang cuts them later.
    chunks: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Layer:
    """One layer: its group, and the kernels of both phases."""

    group: LayerGroup
    prefill: Any
    decode: Any


class OwnMLABackend(OwnAttnBackend):
    """Runs every layer of an MLA model; arguments and errors as of ``OwnAttnBackend``."""

    layout = MLA

    def _bind(self, layers: Sequence[Any], model_runner: Any) -> None:
        AttentionBackendRegistry.register(OWN_PREFIX + self.backend.lower(), _method)
        self._layers: dict[int, Layer] = {}
        for latent, heads in mla_layers(model_runner.model):
            rope = latent.qk_head_dim - latent.v_head_dim
            group = self._group_of(
                model_runner,
                num_heads=latent.tp_q_head_num,
                kv_lora_rank=latent.v_head_dim,
                qk_rope_head_dim=rope,
                qk_nope_head_dim=heads.qk_head_dim - rope,
                v_head_dim=heads.v_head_dim,
                logits_soft_cap=latent.logit_cap or None,
            )
            terms = Terms.of(group.config, group.device, scale=latent.scaling)
            self._layers[latent.layer_id] = Layer(
                group, group.backends["prefill"].impl(terms), group.backends["decode"].impl(terms)
            )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Build the step for every group: a decode, or prompts."""
        if forward_batch.forward_mode.is_decode_or_idle():
            super().init_forward_metadata(forward_batch)
            return
        common = common_of(forward_batch, forward_batch.batch_size, self._req_to_token, self.page_size)
        new = VarlenMetadata.of_new_tokens(common, causal=True)
        self.forward_metadata = {
            group: Prompts(common, new, _builder(group).build_prefill(new)) for group in self._groups.values()
        }

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        """Write the step's latents and attend to all; ``(T, num_heads * kv_lora_rank)``."""
        # ``q`` is the absorbed query, ``(T, num_heads, kv_lora_rank + qk_rope_head_dim)``, ``k`` ``(T, 1, …)`` latents
        # and rope keys, ``v`` the latents again. Raises BatchError for an argument that the adapter does not take.
        own = self._layers[layer.layer_id]
        step: Built = self._step_of(own.group, extra)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id).view(-1, self.page_size, layer.qk_head_dim)
        output = query.new_empty(*query.shape[:2], layer.v_head_dim)
        (part,) = step.metadata.parts
        found: Tensor = own.decode.forward_mqa(query, cache, part.metadata, Outputs(output))
        return found.flatten(1)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend to a prompt's new tokens, or to a chunk of its cached prefix. SGLang has written the latents."""
        # ``k`` and ``v`` are decompressed, ``(S, num_heads, …)``. Returned is ``(T, num_heads * v_head_dim)``, or,
        # where SGLang merges it with more keys, ``(T, num_heads, v_head_dim)`` and its LSE, float32 ``(T,
        # num_heads)``, to base e. Raises BatchError for an argument that is not taken, or where a prompt's tokens are
        # to attend to latents.
        own = self._layers[layer.layer_id]
        step: Prompts = self._step_of(own.group, extra)
        if save_kv_cache:
            raise BatchError(
                f"layer {layer.layer_id} is to write {layer.v_head_dim} values per token: accepted are prompts whose "
                "keys and values the model has decompressed, their latents written"
            )
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_empty(*query.shape[:2], layer.v_head_dim)
        built = self._chunk(own.group, step, forward_batch) if forward_batch.attn_attend_prefix_cache else step.built
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if forward_batch.mha_return_lse else None
        output = own.prefill.forward_mha(query, k, v, built, Outputs(output, lse))
        return output.flatten(1) if lse is None else (output, lse)

    def _chunk(self, group: LayerGroup, step: Prompts, forward_batch: Any) -> Any:
        """Return the prefill backend's metadata of the chunk of cached prefixes that SGLang is at."""
        index = forward_batch.prefix_chunk_idx
        if index not in step.chunks:
            lens_cpu = forward_batch.prefix_chunk_seq_lens_cpu[index]
            cached = replace(
                step.new,
                key_start_loc=forward_batch.prefix_chunk_cu_seq_lens[index],
                key_start_loc_cpu=prefix_sums(lens_cpu),
                max_key_len=int(lens_cpu.max()),
                causal=False,
                query_offsets_cpu=step.common.num_computed_tokens_cpu - forward_batch.prefix_chunk_starts_cpu[index],
                counts_sinks=False,
            )
            step.chunks[index] = _builder(group).build_prefill(cached)
        return step.chunks[index]


def _builder(group: LayerGroup) -> Any:
    return group.backends["prefill"].builder
