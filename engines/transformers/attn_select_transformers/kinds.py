"""The layers of a model by kind: what each asks for, the kernels that serve it, and what was chosen.

A kind lives as long as a model whose layers are of it. Threads share the decision, and each has kernels of its own:
their scratch and their metadata hold one step at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_select import AttentionConfig, Selection, select
from attn_select.decide.selector import rules_in_an_engine
from attn_select.runtime import Attention, AttentionGroup, Capacity


class Kind:
    """One kind of layers on one device."""

    def __init__(self, config: AttentionConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.selection: Selection = select(config, "cpu" if device.type == "cpu" else None, rules_in_an_engine())
        self._thread = threading.local()

    def kernels(self) -> Kernels:
        """Return the kernels of this thread, and on a GPU of its current stream; freed with the thread or the kind."""
        streams: dict[int, Kernels] | None = getattr(self._thread, "streams", None)
        if streams is None:
            streams = self._thread.streams = {}
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        if stream not in streams:
            streams[stream] = Kernels(self.selection, self.device)
        return streams[stream]


class Kernels:
    """Loaded kernels for the layers of one kind, and what these share within one step. One thread uses them."""

    # With ``cuda_graphs`` they must not outgrow their capacity.

    def __init__(
        self,
        selection: Selection,
        device: torch.device,
        capacity: Capacity | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        self.config = selection.config
        self.device = device
        self._selection, self._cuda_graphs = selection, cuda_graphs
        # Replaced by a larger one where a batch exceeds it.
        self.group = self._made(capacity or Capacity())
        # What a route keeps: the last metadata, scratch memory.
        self.state: dict[str, Any] = {}
        self._layers: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Attention]] = weakref.WeakKeyDictionary()

    def _made(self, capacity: Capacity) -> AttentionGroup:
        return AttentionGroup(self._selection, self.device, capacity, cuda_graphs=self._cuda_graphs)

    def reserve(self, requests: int, tokens: int, longest: int) -> None:
        """Make room for a batch; metadata and layers of a smaller group are dropped."""
        bounds = self.group.capacity
        wanted = {"max_num_seqs": requests, "max_num_batched_tokens": tokens, "max_model_len": longest}
        if all(getattr(bounds, name) >= least for name, least in wanted.items()):
            return
        sizes = {name: max(getattr(bounds, name), 1 << (least - 1).bit_length()) for name, least in wanted.items()}
        self.group = self._made(Capacity(**sizes))
        self.state.clear()
        self._layers.clear()

    def layer(self, module: nn.Module, scaling: float | None, sinks: Tensor | None) -> Attention:
        """Return the layer of a transformers module, made once for its scale and sinks."""
        wanted = (scaling, None if sinks is None else (sinks.data_ptr(), sinks._version))
        found = self._layers.get(module)
        if found is None or found[0] != wanted:
            logits = None if sinks is None else sinks.detach().reshape(-1).to(self.device)
            found = wanted, Attention(self.group, scale=scaling, sinks=logits, caller_writes=True)
            self._layers[module] = found
        return found[1]


@dataclass(slots=True)
class Choices:
    """What served one module so far."""

    # Kinds and reasons why calls went to torch's masked attention, in order of appearance.
    kinds: dict[Kind, None] = field(default_factory=dict)
    without_kernel: dict[str, None] = field(default_factory=dict)
    # Kinds that calls were asked about before their masks were read. A kind lives as long as it is held.
    considered: dict[Kind, None] = field(default_factory=dict)


_CHOICES: weakref.WeakKeyDictionary[nn.Module, Choices] = weakref.WeakKeyDictionary()


def choices_of(module: nn.Module) -> Choices:
    """Return what served a module so far; kept as long as the module lives."""
    return _CHOICES.get(module) or _CHOICES.setdefault(module, Choices())


def kind_of(
    query: Tensor, key: Tensor, value: Tensor, attn_type: str, window: int | None, options: Mapping[str, Any]
) -> Kind:
    """Return the kind of layers that a call is of; NoBackendError, with all reasons, where no backend serves them."""
    # The query is ``(B, num_heads, T, head_size)``, keys and values ``(B, num_kv_heads, S, size)``. A window counts
    # the query itself. Of the options ``softcap`` and ``s_aux`` (sinks) are read.
    features = (
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        query.dtype,
        query.device,
        attn_type,
        window,
        options.get("softcap"),
        options.get("s_aux") is not None,
    )
    kind = _KINDS.get(features)
    if kind is None:
        with _MAKING:  # one thread decides; the others get its kind
            kind = _KINDS.get(features) or Kind(_config(*features), query.device)
            _KINDS[features] = kind
    return kind


_KINDS: weakref.WeakValueDictionary[tuple[Any, ...], Kind] = weakref.WeakValueDictionary()
_MAKING = threading.Lock()


def _config(*features: Any) -> AttentionConfig:
    """Return what layers with these features, in the order of ``kind_of``, want."""
    heads, kv_heads, size, value_size, dtype, _, attn_type, window, soft_cap, sinks = features
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        v_head_size=None if value_size == size else value_size,
        dtype=dtype,
        attn_type=attn_type,
        sliding_window=window,
        logits_soft_cap=None if soft_cap is None else float(soft_cap),
        sinks=sinks,
    )


def forget() -> None:
    """Decide anew from here on, for rules or an environment that have changed."""
    _KINDS.clear()
