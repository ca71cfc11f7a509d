"""Layers that cache keys and values, on attn-select's kernels in SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from attn_select.runtime import Attention, BatchError, Scales
from attn_select_sglang.kernels.backend import Built, OwnAttnBackend
from attn_select_sglang.kernels.cache_views import LAYOUT, in_window_pool, own_view
from attn_select_sglang.kernels.sinks import sinks_of


class OwnMHABackend(OwnAttnBackend):
    """Runs every layer of a model with keys and values; arguments and errors as of ``OwnAttnBackend``."""

    layout = LAYOUT

    def _bind(self, layers: Sequence[Any], model_runner: Any) -> None:
        self._layers: dict[int, Attention] = {}
        self._caches: dict[int, Tensor] = {}
        self._sinks = {layer.layer_id: sinks for layer, sinks in sinks_of(model_runner.model).items()}
        for layer in layers:
            window, sinks = layer.sliding_window_size, self._sinks.get(layer.layer_id)
            group = self._group_of(
                model_runner,
                in_window_pool=in_window_pool(self.token_to_kv_pool, layer.layer_id),
                num_heads=layer.tp_q_head_num,
                num_kv_heads=layer.tp_k_head_num,
                head_size=layer.qk_head_dim,
                v_head_size=None if layer.v_head_dim == layer.qk_head_dim else layer.v_head_dim,
                sliding_window=window + 1 if window > -1 else None,  # SGLang does not count the token itself
                logits_soft_cap=layer.logit_cap or None,
                sinks=sinks is not None,
            )
            scales = Scales.make(group.device, k=layer.k_scale_float or 1.0, v=layer.v_scale_float or 1.0)
            self._layers[layer.layer_id] = Attention(
                group, scale=layer.scaling, sinks=sinks, scales=scales, caller_writes=True
            )

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> Tensor:
        """Write the step's keys and values and attend; ``(T, num_heads * value_head_size)``."""
        # Raises BatchError where the model passes other sinks than it had at the start, or an argument that is not
        # taken.
        own = self._layers[layer.layer_id]
        if sinks is not (known := self._sinks.get(layer.layer_id)):
            wanted = "None, for the model has none" if known is None else "the model's own parameter"
            raise BatchError(f"sinks of layer {layer.layer_id}: other than at the start (accepted: {wanted})")
        step: Built = self._step_of(own.group, extra)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        writes = save_kv_cache and k is not None
        rows = [query, *((k, v) if writes else (None, None))]
        output = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        cache = self._cache(layer)
        if step.tokens is None:
            own(*rows, cache, step.metadata, output)
        else:
            rows = [None if row is None else row[step.tokens] for row in rows]
            output[step.tokens] = own(*rows, cache, step.metadata)
        return output.flatten(1)

    forward_extend = forward_decode

    def _cache(self, layer: Any) -> Tensor:
        """Return a layer's cache as the kernels read it; the pool waits for what is still being loaded."""
        key = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        seen = self._caches.get(layer.layer_id)
        if seen is None or seen.data_ptr() != key.data_ptr():
            value = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            seen = self._caches[layer.layer_id] = own_view(key, value, self.page_size)
        return seen
