"""Plans of FlashInfer's MLA wrappers, and the check that a layer runs what was planned for it.

A plan holds what is a layer's own, the softmax scale. The builder has not seen a layer when it plans for the first
time: it plans for ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``, and a layer of another scale plans once more, in
its first call. From then on builds know it. All layers of a kind share a plan, so they have one scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.config import AttentionConfig
from attn_select.errors import ConfigError
from attn_select.runtime.metadata import BatchError
from attn_select_flashinfer.staging import PinnedRing


class SharedScale:
    """The softmax scale of a kind of layers, as far as the builder knows."""

    def __init__(self, config: AttentionConfig) -> None:
        self.value = (cast(int, config.qk_nope_head_dim) + cast(int, config.qk_rope_head_dim)) ** -0.5


class PlannedWrapper:
    """A wrapper and how often it was planned.

    Args:
        wrapper: FlashInfer's.
        ring: pinned memory for schedules.
        schedule: uint8 on the device, where schedules go instead of to the wrapper's own 8 MiB.
    """

    def __init__(self, wrapper: Any, ring: PinnedRing, schedule: Tensor | None = None) -> None:
        self.wrapper, self.plans, self._ring = wrapper, 0, ring
        if schedule is not None:
            wrapper._int_workspace_buffer = schedule

    def plan(self, scale: float, arguments: dict[str, Any]) -> int:
        """Plan, not waiting for the device; return the plan's number."""
        self._ring.plan(self.wrapper, sm_scale=scale, **arguments)
        self.plans += 1
        return self.plans


@dataclass(slots=True)
class PlannedCall:
    """One call that a wrapper was planned for, the same for all layers.

    Attributes:
        num_tokens: queries.
        planned: the wrapper.
        arguments: of its plan, but for the scale.
        shared: the builder's scale.
    """

    num_tokens: int
    planned: PlannedWrapper
    arguments: dict[str, Any]
    shared: SharedScale
    _scale: float = field(init=False)
    _number: int = field(init=False)
    _ran: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._plan()

    def _plan(self) -> None:
        self._scale = self.shared.value
        self._number = self.planned.plan(self._scale, self.arguments)

    def ready(self, scale: float) -> Any:
        """Return the wrapper, planned for this call and scale.

        Raises:
            BatchError: the builder has been used for another batch since.
            ConfigError: another layer of this kind has another scale.
        """
        if self._number != self.planned.plans:
            raise BatchError("this metadata is an earlier batch's: its plan was replaced by that of a later build")
        if scale != self._scale:
            if self._ran:
                text = f"layers of one kind with softmax scales {self._scale} and {scale}: one plan serves one scale"
                raise ConfigError(text, fields=["scale"])
            self.shared.value = scale
            self._plan()
        self._ran = True
        return self.planned.wrapper


def blank_rows(output: Tensor, lse: Tensor | None, rows: Tensor, sinks: Tensor | None = None) -> None:
    """Give rows without keys output 0 and LSE -inf, or their sink.

    Args:
        output: ``(T, H, D)``.
        lse: float32 ``(T, H)``.
        rows: bool ``(T,)``.
        sinks: float32 ``(H,)``.
    """
    output.masked_fill_(rows[:, None, None], 0)
    if lse is not None:
        empty = torch.full((), -torch.inf, device=lse.device) if sinks is None else sinks
        torch.where(rows[:, None], empty, lse, out=lse)
