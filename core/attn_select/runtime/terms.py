"""What travels from a layer to its kernels: ``Terms``, fixed for a layer, and ``Outputs``, what one step writes.

A new term is a field of ``Terms`` and of ``GivenTerms``; a tensor per head is also a row of ``PER_HEAD``
(``attn_select.layer.features``). Layers, groups, ranks and backends hand both records on as they are.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from attn_select.errors import ConfigError, show
from attn_select.layer.config import AttentionConfig
from attn_select.layer.features import PER_HEAD
from attn_select.runtime.scales import Scales

_DTYPES = {"alibi_slopes": torch.float32}
"""Of tensors per head that kernels take in one dtype; the others stay in the model's."""
_LEAST = {"sinks": -math.inf}
"""The least numbers of tensors per head, where not finite: such a sink is none."""


class GivenTerms(TypedDict, total=False):
    """The arguments that a layer takes for its ``Terms``, whose attributes of the same names say more."""

    scale: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    scales: Scales | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Terms:
    """What a layer is beyond its inputs, checked, on its device.

    Attributes:
        scale: factor on ``q . k``.
        sliding_window: tokens that a query sees to each side it may look at, itself included; None: all.
        logits_soft_cap: ``cap * tanh(score / cap)``; None: none.
        alibi_slopes: float32 ``(num_heads,)``; None without ``config.alibi``.
        sinks: ``(num_heads,)`` logits that count in the denominator only; None without ``config.sinks``.
        scales: of FP8 queries, keys and values.
    """

    scale: float
    scales: Scales
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(
        cls,
        config: AttentionConfig,
        device: torch.device,
        *,
        checked: bool = False,
        scale: float | None = None,
        scales: Scales | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Terms:
        """Return the terms of a layer.

        Args:
            config: the layer.
            device: where it runs.
            checked: read tensors back from a GPU to check their numbers.
            scale: None: ``config.softmax_scale``.
            scales: None: all are 1.
            alibi_slopes, sinks: required where the config asks for them, else refused.

        Raises:
            ConfigError: the scale is not a finite number above 0; or slopes, sinks or scales are missing, unwanted, not
                finite, no floating-point tensors or of the wrong shape.
        """
        tensors = {"alibi_slopes": alibi_slopes, "sinks": sinks}
        made: dict[str, Any] = {
            name: _per_head(name, tensor, config, device, checked) for name, tensor in tensors.items()
        }
        return cls(
            scale=_checked_scale(scale, config),
            scales=_checked_scales(scales, config, device),
            sliding_window=config.sliding_window,
            logits_soft_cap=config.logits_soft_cap,
            **made,
        )

    def under(self, config: AttentionConfig) -> Terms:
        """Return the terms of the same layer with the tensors alone that another config asks for."""
        unwanted: dict[str, Any] = {name: None for name, field in PER_HEAD.items() if not getattr(config, field)}
        return replace(self, **unwanted)

    def of_heads(self, some: slice) -> Terms:
        """Return the terms of some of the query heads."""
        tensors = {name: getattr(self, name) for name in PER_HEAD}
        return replace(self, **{name: tensor[some] for name, tensor in tensors.items() if tensor is not None})

    def without_sinks(self) -> Terms:
        """Return the terms of a part of the keys whose result is merged with another one, which counts the sinks."""
        return self if self.sinks is None else replace(self, sinks=None)

    def given(self, config: AttentionConfig) -> GivenTerms:
        """Return the arguments that make a layer of another config with these terms, as ``under``."""
        own = self.under(config)
        return cast(GivenTerms, {name: getattr(own, name) for name in GivenTerms.__annotations__})


Inputs = tuple[Tensor, Tensor | None, Tensor | None, Any]
"""The query, key, value and cache of a step of a layer."""


@dataclass(slots=True, eq=False)
class Outputs:
    """What a step of a layer writes: T tokens, and behind them padding that is left alone.

    Attributes:
        output: ``(T', num_heads, value_head_size)`` in the compute dtype, or quantised where the config wants it; T' at
            least T.
        lse: float32 ``(T', num_heads)``; None: not wanted. Only plans that return the LSE are asked.
        scale: float32 scale of a quantised output, on the device; None without.
        block_scale: where the kernel writes the scales of FP4 blocks; None without.
    """

    output: Tensor
    lse: Tensor | None = None
    scale: Tensor | None = None
    block_scale: Tensor | None = None

    def rows(self, rows: slice) -> Outputs:
        """Return what some of the tokens write; the block scales stay those of all."""
        lse = None if self.lse is None else self.lse[rows]
        return Outputs(self.output[rows], lse, self.scale, self.block_scale)

    def first(self, tokens: int) -> Outputs:
        """Return what the first tokens write: themselves where there is no padding, for views take a microsecond."""
        if self.output.shape[0] == tokens and (self.lse is None or self.lse.shape[0] == tokens):
            return self
        return self.rows(slice(0, tokens))


def _checked_scale(scale: float | None, config: AttentionConfig) -> float:
    if scale is None:
        return config.softmax_scale
    if isinstance(scale, bool) or not isinstance(scale, Real) or not 0 < scale < math.inf:
        raise ConfigError(f"scale = {show(scale)}: accepted are finite numbers above 0", fields=["scale"])
    return float(scale)


def _checked_scales(scales: Scales | None, config: AttentionConfig, device: torch.device) -> Scales:
    heads = config.num_kv_heads if config.per_head_quant_scales else 0
    if scales is None:
        return Scales.make(device, num_kv_heads=heads)
    of_keys = (heads,) if heads else ()
    for name, tensor, shape in (
        ("q_scale", scales.q, ()),
        ("k_scale", scales.k, of_keys),
        ("v_scale", scales.v, of_keys),
    ):
        here = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or not here:
            text = (
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: accepted is float32 {shape} "
                f"on {device}"
            )
            raise ConfigError(text, fields=[name], hint="make them with Scales.make")
    return scales


def _per_head(
    name: str, tensor: Tensor | None, config: AttentionConfig, device: torch.device, checked: bool
) -> Tensor | None:
    field, least = PER_HEAD[name], _LEAST.get(name, -sys.float_info.max)
    wanted = getattr(config, field)
    if wanted != (tensor is not None):
        seen = "missing" if tensor is None else "given"
        raise ConfigError(f"{name} {seen}, but the layers were selected with {field} = {wanted}", fields=[name])
    if tensor is None:
        return None
    check_float(name, tensor)
    if tuple(tensor.shape) != (config.num_heads,):
        text = f"{name} of shape {tuple(tensor.shape)}: accepted is ({config.num_heads},), one per query head"
        raise ConfigError(text, fields=[name])
    if tensor.device.type == "cpu" or checked:  # else the host would wait for the device
        wrong = [number for number in tensor.tolist() if not least <= number < math.inf]
        if wrong:
            raise ConfigError(f"{name} holds {wrong[0]}: accepted are finite numbers", fields=[name])
    return tensor.to(device, _DTYPES.get(name, tensor.dtype)).contiguous()


def check_float(name: str, tensor: object) -> None:
    """Raise ConfigError where a layer is given something else than a tensor of floating-point numbers."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        what = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise ConfigError(f"{name} is {what}: accepted is a floating-point tensor", fields=[name])
