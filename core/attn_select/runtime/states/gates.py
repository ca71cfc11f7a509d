"""``Gates``: how much of its state a token keeps, and how much it writes; as numbers, or raw, before the activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attn_select.layer.state import StateConfig
from attn_select.runtime.metadata import BatchError
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RawGates:
    """Gates before the activation, as a model's projections give them, with the names of checkpoints and of vLLM.

    The log-decay is ``-exp(A_log) * softplus(a + dt_bias)``. The write strength is ``sigmoid(b)``, of Mamba-2 the step
    ``softplus(a + dt_bias)`` itself.

    Attributes:
        A_log: float32 ``(num_v_heads,)``.
        a: ``dtype`` ``(T, num_v_heads)``, of KDA ``(T, num_v_heads, head_size)``; of Mamba-2 ``dt``.
        dt_bias: float32 ``(num_v_heads,)``, of KDA ``(num_v_heads, head_size)``.
        b: ``dtype`` ``(T, num_v_heads)``; None for Mamba-2.
    """

    A_log: Tensor
    a: Tensor
    dt_bias: Tensor
    b: Tensor | None = None


class Gates:
    """The gates of T tokens of one layer: given as numbers, or raw.

    Args:
        log_decay: float32 ``(T, num_v_heads)``, of KDA ``(T, num_v_heads, head_size)``: at most 0.
        write_strength: float32 ``(T, num_v_heads)``; None for lightning attention, which has none.
        raw: in the place of both: kernels that activate gates themselves take them so, and for others the numbers are
            computed once, when they are first asked for, and keep no graph.

    Raises:
        BatchError: numbers are given beside ``raw``, or neither.
    """

    __slots__ = ("_decay", "_strength", "raw")

    def __init__(
        self, log_decay: Tensor | None = None, write_strength: Tensor | None = None, *, raw: RawGates | None = None
    ) -> None:
        if (log_decay is None) is (raw is None) or (raw is not None and write_strength is not None):
            seen = "log_decay and raw are None" if raw is None else "numbers are given beside raw"
            raise BatchError(f"{seen}: accepted are log_decay and write_strength, or raw alone")
        self._decay, self._strength, self.raw = log_decay, write_strength, raw

    @property
    def log_decay(self) -> Tensor:
        """The log-decay, as the argument."""
        if self._decay is None:
            self._activate()
        assert self._decay is not None
        return self._decay

    @property
    def write_strength(self) -> Tensor | None:
        """The write strength, as the argument."""
        if self._decay is None:
            self._activate()
        return self._strength

    def _activate(self) -> None:
        assert self.raw is not None
        with torch.no_grad():
            step = functional.softplus(self.raw.a.float() + self.raw.dt_bias)
            rate = -self.raw.A_log.exp()
            self._decay = step * (rate if step.ndim == 2 else rate[:, None])
            self._strength = step if self.raw.b is None else self.raw.b.float().sigmoid()

    def rows(self, rows: slice) -> Gates:
        """Return the gates of some of the tokens."""
        if (raw := self.raw) is not None:
            b = None if raw.b is None else raw.b[rows]
            return Gates(raw=RawGates(A_log=raw.A_log, a=raw.a[rows], dt_bias=raw.dt_bias, b=b))
        return Gates(self.log_decay[rows], None if self._strength is None else self._strength[rows])

    def given(self) -> dict[str, Tensor]:
        """Return the tensors that were given, by name."""
        if (raw := self.raw) is None:
            named = {"log_decay": self._decay, "write_strength": self._strength}
        else:
            named = {"A_log": raw.A_log, "a": raw.a, "dt_bias": raw.dt_bias, "b": raw.b}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def check(self, config: StateConfig, tokens: int, device: torch.device) -> None:
        """Raise BatchError for a tensor that is missing, unwanted, of the wrong shape or dtype, or elsewhere."""
        dtype, heads = PLAIN_DTYPES[config.dtype], (tokens, config.num_v_heads)
        width = (config.head_size,) if config.rule.decay == "channel" else ()
        raw, writes = self.raw, config.rule.writes
        if raw is None:
            wanted = {
                "log_decay": (self._decay, torch.float32, (*heads, *width), True),
                "write_strength": (self._strength, torch.float32, heads, writes),
            }
        else:
            if not writes:
                raise BatchError(f"raw gates with recurrence {config.recurrence}: accepted is log_decay")
            wanted = {
                "A_log": (raw.A_log, torch.float32, heads[1:], True),
                "a": (raw.a, dtype, (*heads, *width), True),
                "dt_bias": (raw.dt_bias, torch.float32, (*heads[1:], *width), True),
                "b": (raw.b, dtype, heads, config.recurrence != "mamba2"),
            }
        for name, (tensor, accepted, shape, present) in wanted.items():
            if (tensor is not None) is not present:
                seen, fits = ("a tensor", "None") if tensor is not None else ("None", f"{accepted} {shape}")
                raise BatchError(f"{name} is {seen} with recurrence {config.recurrence} (accepted: {fits})")
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise BatchError(f"{name} is a {type(tensor).__name__}: accepted is {accepted} {shape}")
            if tensor.shape != shape or tensor.dtype is not accepted:
                raise BatchError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: accepted is {accepted} {shape}")
            if tensor.device != device:
                raise BatchError(f"{name} is on {tensor.device}: accepted is {device}")
