"""``LinearAttention``: one layer that keeps a state, from the projected inputs to the output of the recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.runtime.backend_faults import blame
from attn_select.runtime.metadata import BatchError
from attn_select.runtime.states.gates import Gates
from attn_select.runtime.states.state_backend import StateImpl
from attn_select.runtime.states.state_batch import StateMetadata, StatePart
from attn_select.runtime.states.state_cache import StateCache
from attn_select.runtime.states.state_conv import causal_conv
from attn_select.runtime.states.state_group import StateGroup
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


class LinearAttention(nn.Module):
    """One layer of a group that keeps a state, for inference: no gradient flows through it.

    Args:
        group: the group of layers that it belongs to.
        conv_weight: ``(conv_dim, conv_kernel_size)``, oldest token first; required with a convolution.
        conv_bias: ``(conv_dim,)``, or None.
        skip: ``(num_v_heads,)``, factors by which values are added to the output (D of Mamba-2), or None.

    Raises:
        ConfigError: the weights of the convolution are missing or unwanted, or a tensor has the wrong shape.
    """

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
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ConfigError(f"{name} has shape {tuple(tensor.shape)} (accepted: {shape})", fields=[name])
        self._conv_weight, self._conv_bias, self._skip = conv_weight, conv_bias, skip
        made: dict[type[object], StateImpl] = {}
        self.impls: dict[Phase, StateImpl] = {}
        for phase, served in group.served.items():
            if served.backend not in made:
                try:
                    made[served.backend] = served.backend.impl_cls(served.context)
                except Exception as error:
                    blame(served.spec, "its impl", error)
                    raise
            self.impls[phase] = made[served.backend]
        keys, values = config.num_heads * config.head_size, config.num_v_heads * config.v_head_size
        self._widths = {"query": keys, "key": keys, "value": values}
        self._order = config.rule.channels

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
                order of ``config.rule.channels``; T may be larger than the step's tokens.
            gates: of the T tokens.
            cache: the layer's states.
            metadata: of the step.
            output: ``dtype`` ``(T, num_v_heads, v_head_size)``; None: a new tensor.

        Returns:
            The output. Its rows behind the step's tokens are left alone.

        Raises:
            BatchError: a tensor has the wrong shape or dtype, or a kernel activates gates itself and they are not raw.
        """
        config, tokens = self.group.config, metadata.num_actual_tokens
        self._check(channels, gates, metadata, output)
        if output is None:
            shape = (channels.shape[0], config.num_v_heads, config.v_head_size)
            output = torch.empty(shape, dtype=channels.dtype, device=channels.device)
        mixed = channels[:tokens]
        if self._conv_weight is not None:
            assert cache.conv is not None
            assert metadata.conv is not None
            mixed = causal_conv(mixed, self._conv_weight, self._conv_bias, cache.conv, metadata.conv)
        widths = [self._widths[name] for name in self._order]
        by_name = dict(zip(self._order, torch.split(mixed, widths, dim=-1), strict=True))
        query = by_name["query"].reshape(tokens, config.num_heads, config.head_size)
        key = by_name["key"].reshape(tokens, config.num_heads, config.head_size)
        value = by_name["value"].reshape(tokens, config.num_v_heads, config.v_head_size)
        parts: dict[Phase, StatePart | None] = {"decode": metadata.decode, "prefill": metadata.prefill}
        for phase, part in parts.items():
            if part is None:
                continue
            own = slice(part.first_token, part.first_token + part.num_tokens)
            rows = query[own], key[own], value[own], gates.rows(own)
            try:
                self.impls[phase].forward(phase, *rows, cache.state, part, output[own])
            except Exception as error:
                blame(self.group.served[phase].spec, "forward()", error)
                raise
        if self._skip is not None:
            output[:tokens] += (self._skip[:, None] * value).to(output.dtype)
        return output

    def _check(self, channels: Tensor, gates: Gates, metadata: StateMetadata, output: Tensor | None) -> None:
        config = self.group.config
        dtype, rows = PLAIN_DTYPES[config.dtype], channels.shape[0]
        for name, tensor, shape in (
            ("channels", channels, (rows, config.width)),
            ("output", output, (rows, config.num_v_heads, config.v_head_size)),
        ):
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype is not dtype):
                seen = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise BatchError(f"{name} is {seen}: accepted is {dtype} {shape}")
        if rows < metadata.num_actual_tokens:
            raise BatchError(f"channels has {rows} rows, and the step has {metadata.num_actual_tokens} tokens")
        gates.check(config, rows)
        parts: dict[Phase, StatePart | None] = {"decode": metadata.decode, "prefill": metadata.prefill}
        for phase, part in parts.items():
            if gates.raw is None and part is not None and phase in self.impls[phase].raw_gates:
                name = self.group.served[phase].spec.name
                raise BatchError(
                    f"gates are numbers, and {name} activates them itself in {phase}: accepted are raw gates",
                    hint="give the layer Gates(raw=RawGates(A_log=…, a=…, dt_bias=…, b=…))",
                )
