"""The scales of FP8 queries, keys and values, on the device and on the host at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_select.errors import ConfigError

Scale = float | Tensor


@dataclass(slots=True, eq=False)
class Scales:
    """What a stored FP8 number is multiplied by. Make one with ``Scales.make``; kernels read either form.

    Attributes:
        q, k, v: float32 on the layer's device, ``()``, or for k and v ``(num_kv_heads,)`` with
            ``per_head_quant_scales``. With MLA the latent is key and value: ``k`` is for both.
        q_float, k_float, v_float: the same on the host; with one scale per head, the largest.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_float: float
    k_float: float
    v_float: float

    @classmethod
    def make(
        cls, device: torch.device | str, q: Scale = 1.0, k: Scale = 1.0, v: Scale = 1.0, *, num_kv_heads: int = 0
    ) -> Scales:
        """Return scales on ``device``. Reads tensors back to the host: call it when a model is loaded, not per step.

        Args:
            q: positive and finite, one number.
            k: the same, or with ``num_kv_heads`` one per KV head.
            v: the same.
            num_kv_heads: with ``per_head_quant_scales`` the number of heads; 0: one scale per tensor.

        Raises:
            ConfigError: a scale is zero, negative, NaN or infinite, or has the wrong shape.
        """
        made: list[tuple[Tensor, float]] = []
        for name, value in (("q_scale", q), ("k_scale", k), ("v_scale", v)):
            # Cloned, so that a later write to the caller's tensor cannot make device and host differ.
            host = torch.as_tensor(value, dtype=torch.float32, device="cpu").clone()
            shapes: list[tuple[int, ...]] = [(), (1,)]
            per_head = num_kv_heads > 0 and name != "q_scale"
            if per_head and num_kv_heads > 1:
                shapes.append((num_kv_heads,))
            if tuple(host.shape) not in shapes:
                accepted = " or ".join(str(shape) for shape in shapes)
                raise ConfigError(f"{name} of shape {tuple(host.shape)}: accepted is {accepted}", fields=[name])
            bad = [number for number in host.flatten().tolist() if not (math.isfinite(number) and number > 0)]
            if bad:
                raise ConfigError(f"{name} = {bad[0]}: accepted are finite numbers above 0", fields=[name])
            if host.numel() == 1:
                host = host.reshape(1).repeat(num_kv_heads) if per_head else host.reshape(())
            made.append((host.to(device), float(host.max())))
        (q_t, q_f), (k_t, k_f), (v_t, v_f) = made
        return cls(q_t, k_t, v_t, q_f, k_f, v_f)
