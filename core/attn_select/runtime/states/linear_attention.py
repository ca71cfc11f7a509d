"""``LinearAttention``: one layer that keeps a state, from the projected inputs to the output of the recurrence."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch
from torch import Tensor, nn

from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.runtime.attention import foreign_metadata
from attn_select.runtime.backend_faults import call
from attn_select.runtime.metadata import BatchError
from attn_select.runtime.ops import causal_conv
from attn_select.runtime.states.gates import Gates
from attn_select.runtime.states.state_backend import StateImpl
from attn_select.runtime.states.state_batch import StateMetadata
from attn_select.runtime.states.state_cache import StateCache
from attn_select.runtime.states.state_checks import check_weight
from attn_select.runtime.states.state_group import StateGroup
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


class LinearAttention(nn.Module):
    """One layer of a group that keeps a state, for inference: no gradient flows through it.

    Args:
        group: the group of layers that it belongs to.
        conv_weight: ``(conv_dim, conv_kernel_size)``, oldest token first; required with a convolution.
        conv_bias: ``(conv_dim,)``, or None.
        skip: ``(num_v_heads,)``, factors by which values are added to the output (D of Mamba-2), or None.

    The weights are float32, bfloat16 or float16, and buffers of the module: they move and change their dtype with it,
    and are not in its ``state_dict``. One that lies on the group's device is not copied, so what is written to it later
    counts.

    Raises:
        ConfigError: the weights of the convolution are missing or unwanted, or one is no tensor or of the wrong shape
            or dtype, or (in checked mode) not finite.
    """

    conv_weight: Tensor | None
    conv_bias: Tensor | None
    skip: Tensor | None

    def __init__(
        self,
        group: StateGroup,
        conv_weight: Tensor | None = None,
        conv_bias: Tensor | None = None,
        *,
        skip: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.group, config = group, group.config
        wanted = (config.conv_dim, config.conv_kernel_size)
        if (conv_weight is None) is (config.conv_kernel_size > 0):
            text = "is missing" if conv_weight is None else "is given"
            raise ConfigError(
                f"conv_weight {text} with conv_kernel_size = {config.conv_kernel_size} (accepted: "
                f"{f'a tensor {wanted}' if config.conv_kernel_size else 'None'})",
                fields=["conv_weight"],
            )
        for name, tensor, shape in (
            ("conv_weight", conv_weight, wanted),
            ("conv_bias", conv_bias, wanted[:1]),
            ("skip", skip, (config.num_v_heads,)),
        ):
            if tensor is not None:
                if not isinstance(tensor, Tensor):
                    text = f"{name} is a {type(tensor).__name__} (accepted: a tensor {shape})"
                    raise ConfigError(text, fields=[name])
                if tensor.shape != shape:
                    raise ConfigError(f"{name} has shape {tuple(tensor.shape)} (accepted: {shape})", fields=[name])
                tensor = tensor.detach().to(group.device)
                try:
                    check_weight(name, tensor, group.device, group.checked)
                except BatchError as error:
                    raise ConfigError(error.message, fields=[name]) from None
            self.register_buffer(name, tensor, persistent=False)
        self.impls: dict[Phase, StateImpl] = {}
        for own in dict.fromkeys(group.backends.values()):
            self.impls |= dict.fromkeys(own.context.plans, own.impl())
        keys, values = config.num_heads * config.head_size, config.num_v_heads * config.v_head_size
        self._widths = {"query": keys, "key": keys, "value": values}
        self._order = config.rule.channels
        self._dtype = PLAIN_DTYPES[config.dtype]
        self._row, self._output_row = (config.width,), (config.num_v_heads, config.v_head_size)
        self._least = {
            phase: (each, group.backends[phase].spec.name)
            for phase, impl in self.impls.items()
            if (each := impl.least_log_decay.get(phase)) is not None
        }
        # Weak references: a layer does not keep a cache alive that the engine has freed.
        self._cache_seen: tuple[Callable[[], Tensor | None], Callable[[], Tensor | None]] = (_none, _none)

    @property
    def raw_gates(self) -> bool:
        """Whether a phase's kernels activate gates themselves: ``forward`` takes raw ones alone then."""
        return any(phase in impl.raw_gates for phase, impl in self.impls.items())

    def forward(
        self,
        channels: Tensor,
        gates: Gates,
        cache: StateCache,
        metadata: StateMetadata,
        output: Tensor | None = None,
    ) -> Tensor:
        """Run one step: the convolution, then the recurrence. The states that the metadata names are written.

        Args:
            channels: ``dtype`` ``(T, width)``, the queries of all heads, the keys and the values side by side, in the
                order of ``config.rule.channels``; T may be larger than the step's tokens. Any strides.
            gates: of the T tokens.
            cache: the layer's states (``group.allocate`` or ``group.adopt``).
            metadata: what ``group.build`` returned. A step whose requests all write other slots than they read
                (``StatePool``) can run again and gives the same.
            output: ``dtype`` ``(T, num_v_heads, v_head_size)``; None: a new tensor.

        Returns:
            The output. Its rows behind the step's tokens are left alone. Neither it nor the states keep a graph.

        Raises:
            BatchError: before anything is written: another group built the metadata, an argument has the wrong type,
                shape, dtype or device, a kernel activates gates itself and they are not raw, or (in checked mode) a
                number is not finite, a log-decay is positive or less than a kernel computes right, the output shares
                memory, or a slot of the cache does not hold the state that a request reads.
        """
        if torch.is_grad_enabled():
            # With gradients, a write to the states would link every later step to the graph of the first one.
            with torch.no_grad():
                return self.forward(channels, gates, cache, metadata, output)
        self._check(channels, gates, cache, metadata, output)
        config, tokens = self.group.config, metadata.num_actual_tokens
        watched, weights = self.group.checked and not _capturing(channels), self._buffers
        if watched:
            named = {"channels": channels, "output": output}
            self.group.check_contents(named, gates, weights, cache, metadata, self._least)
        if output is None:
            output = channels.new_empty((channels.shape[0], *self._output_row))
        mixed = channels[:tokens]
        if (weight := weights["conv_weight"]) is not None:
            assert cache.conv is not None
            assert metadata.conv is not None
            where = metadata.conv
            slots = (where.read_slots, where.taps, where.write_slots, where.windows)
            mixed = causal_conv(_packed(mixed), weight, weights["conv_bias"], cache.conv, *slots)
        widths = [self._widths[name] for name in self._order]
        by_name = dict(zip(self._order, torch.split(mixed, widths, dim=-1), strict=True))
        query = by_name["query"].reshape(tokens, config.num_heads, config.head_size)
        key = by_name["key"].reshape(tokens, config.num_heads, config.head_size)
        value = by_name["value"].reshape(tokens, config.num_v_heads, config.v_head_size)
        for phase, part in metadata.parts:
            own = slice(part.first_token, part.first_token + part.num_tokens)
            rows = query[own], key[own], value[own], gates.rows(own)
            spec, run = self.group.backends[phase].spec, self.impls[phase].forward
            call(spec, "forward()", "", run, phase, *rows, cache.state, part, output[own])
        # The skip adds the values that the convolution has given, not the projected ones.
        if (skip := weights["skip"]) is not None:
            output[:tokens] += (skip[:, None] * value).to(output.dtype)
        if watched:
            self.group.wrote(cache, metadata)
        return output

    def _check(
        self, channels: Tensor, gates: Gates, cache: StateCache, metadata: StateMetadata, output: Tensor | None
    ) -> None:
        group, dtype = self.group, self._dtype
        if getattr(metadata, "group", None) is not group:
            raise foreign_metadata("metadata", metadata)
        if not isinstance(channels, Tensor):
            raise BatchError(f"channels is a {type(channels).__name__}: accepted is a tensor")
        if not isinstance(gates, Gates):
            raise BatchError(f"gates is a {type(gates).__name__}: accepted is Gates(log_decay, write_strength)")
        rows = channels.shape[0] if channels.ndim else 0
        for name, tensor, row in (("channels", channels, self._row), ("output", output, self._output_row)):
            if tensor is None:
                continue
            if tensor.shape != (rows, *row) or tensor.dtype is not dtype or tensor.device != group.device:
                text = f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                raise BatchError(f"{text}: accepted is {dtype} {(rows, *row)} on {group.device}")
        if rows < metadata.num_actual_tokens:
            raise BatchError(f"channels has {rows} rows, and the step has {metadata.num_actual_tokens} tokens")
        gates.check(group.config, rows, group.device)
        state, conv = self._cache_seen  # engines bring the same one every time
        if type(cache) is not StateCache or state() is not cache.state or conv() is not cache.conv:
            group.check_cache(cache)
            self._cache_seen = ref(cache.state), _none if cache.conv is None else ref(cache.conv)
        for phase, _ in metadata.parts:
            if gates.raw is None and phase in self.impls[phase].raw_gates:
                name = self.group.backends[phase].spec.name
                raise BatchError(
                    f"gates are numbers, and {name} activates them itself in {phase}: accepted are raw gates",
                    hint="give the layer Gates(raw=RawGates(A_log=…, a=…, dt_bias=…, b=…))",
                )


def _none() -> None:
    """In the place of a reference to a tensor that there is not."""


def _packed(rows: Tensor) -> Tensor:
    """Return rows whose numbers lie one behind the other: themselves where they do."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is captured: nothing can be read back then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
