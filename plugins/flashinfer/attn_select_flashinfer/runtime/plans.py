"""FlashInfer's plans: how they are copied to the device, and which of them is there.

``plan`` of every native wrapper writes a schedule into the wrapper's pinned buffer and copies it asynchronously
(``_pin_memory_int_workspace_buffer``; flashinfer/prefill.py, decode.py and mla/_core.py 0.6.14). Two things follow:

- If a wrapper planned again before its copy has finished, the earlier step would run by the later step's schedule. Each
  plan therefore gets a buffer whose last copy has finished (``PinnedRing``). Nothing waits for that. Since 0.7 the MLA
  wrapper pins a new buffer for each plan and drops the last one, which is kept until its copy has finished.
- The wrapper and the schedule on the device hold the last plan alone. A batch therefore asks before it runs whether its
  own plan is still there, and is planned again where it is not (``Plan.ready``). In the usual order, where each batch
  runs before the next one is built, that is one comparison.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.errors import ConfigError, KernelMismatchError
from attn_select.layer.config import AttentionConfig
from attn_select.runtime.metadata import BatchError
from attn_select_flashinfer.facts.libraries import INT_WORKSPACE, READ
from attn_select_flashinfer.runtime.mla_schedule import BalancedPlan

PINNED = "_pin_memory_int_workspace_buffer"
"""Attribute of a wrapper: where its schedules are written on the host."""


class _Passed:
    """The event of a device without streams."""

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


def new_event(device: torch.device) -> Any:
    """Return an event that says whether the copies before it have finished."""
    return torch.Event(device) if device.type == "cuda" else _Passed()


class PinnedRing:
    """Plans wrappers, each time with a pinned buffer that no copy is still read from."""

    def __init__(self, device: torch.device, *, own: bool = False) -> None:
        # device: where the wrappers run; copies are ordered on its current stream
        # own: whether the wrappers pin a buffer of their own for each plan. torch does not see FlashInfer's copy, and
        # would give a buffer that was dropped to the next plan at once, so it is kept until the copy has finished.
        self._device, self._own = device, own
        self._slots: list[tuple[Tensor, Any]] = []

    @property
    def buffers(self) -> int:
        """Return how many buffers are kept: one, or more where the host runs steps ahead of the device."""
        return len(self._slots)

    def plan(self, wrapper: Any, *args: Any, cleared: int = 0, **kwargs: Any) -> None:
        """Call ``wrapper.plan``."""
        # cleared: bytes at the buffer's start that are zero before it
        if self._own:
            self._slots = [slot for slot in self._slots if not slot[1].query()]
            wrapper.plan(*args, **kwargs)
            slot = _pinned_of(wrapper), new_event(self._device)
            self._slots.append(slot)
        else:
            _pinned_of(wrapper)  # raises where the wrapper keeps no such buffer: its copies would be unguarded
            slot = self._free()
            slot[0][:cleared].zero_()
            setattr(wrapper, PINNED, slot[0])
            wrapper.plan(*args, **kwargs)
        # Behind the copy on its stream: once it has passed, the copy has read the buffer, which is free again.
        slot[1].record(torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None)

    def _free(self) -> tuple[Tensor, Any]:
        for slot in self._slots:
            if slot[1].query():
                return slot
        pinned = torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._slots.append((pinned, new_event(self._device)))
        return self._slots[-1]


def _pinned_of(wrapper: Any) -> Tensor:
    pinned: Tensor | None = getattr(wrapper, PINNED, None)
    if pinned is None:
        name = type(wrapper).__name__
        text = f"{name} of the installed FlashInfer has no {PINNED}, so that its plans may overwrite each other"
        raise KernelMismatchError(text, hint=READ)
    return pinned


@dataclass(slots=True, eq=False)
class Schedule:
    """Where plans lie on the device; several wrappers may share it."""

    memory: Tensor | None = None  # uint8; None: the wrapper's own
    holder: Plan | None = None  # the plan that is there; None where there is none that can be trusted


@dataclass(slots=True, eq=False)
class Wrapper:
    """One of FlashInfer's wrappers."""

    made: Any  # FlashInfer's object
    schedule: Schedule  # where its plans go
    # whether a CUDA graph reads its plans: then the device reads them at times that nothing here sees
    captured: bool = False
    balanced: Any = None  # ``MLALists.info_of`` it; None before its first balanced plan


class Plan(ABC):
    """One batch, planned on a wrapper. What ``write`` passes must not change, because it may be passed again."""

    __slots__ = ("wrapper",)

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.put()

    @abstractmethod
    def write(self) -> None:
        """Call FlashInfer's ``plan``."""

    def put(self) -> None:
        """Plan, not waiting for the device."""
        schedule = self.wrapper.schedule
        schedule.holder = None  # where ``write`` raises, what lies there is nobody's plan
        self.write()
        schedule.holder = self

    def ready(self) -> Any:
        """Return FlashInfer's wrapper with this plan, which is made again where a later one took its place."""
        if self.wrapper.schedule.holder is not self:
            self._check_again()
            self.put()
        return self.wrapper.made

    def _check_again(self) -> None:
        holder = self.wrapper.schedule.holder
        if self.wrapper.captured:
            text = "this metadata was built for a CUDA graph, and a later build has overwritten the lists that it reads"
        elif holder is not None and holder.wrapper.captured:
            text = "a later build has planned a CUDA graph in the buffer that held the plan of this metadata"
        elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            text = "a later build has overwritten the plan of this metadata, and it cannot be planned in a capture"
        else:
            return
        raise BatchError(text, hint="with CUDA graphs, run each batch before the next one is built, or build it again")


# An MLA plan holds the softmax scale, which belongs to a layer. The builder has not seen a layer when it plans for
# the first time. It plans for ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``. A layer of another scale plans
# once more, in its first call, and later builds use its scale. All layers of a kind share a plan, so they have one
# scale.
class SharedScale:
    """The softmax scale of a kind of MLA layers, as far as the builder knows."""

    def __init__(self, config: AttentionConfig) -> None:
        self.value = (cast(int, config.qk_nope_head_dim) + cast(int, config.qk_rope_head_dim)) ** -0.5


class ScaledPlan(Plan):
    """One call of an MLA wrapper, planned for one softmax scale, the same for all layers."""

    __slots__ = ("_arguments", "_balanced", "_ran", "_ring", "_scale", "_shared", "num_tokens")

    def __init__(
        self,
        num_tokens: int,
        wrapper: Wrapper,
        ring: PinnedRing,
        arguments: dict[str, Any],
        shared: SharedScale,
        balanced: BalancedPlan | None = None,
    ) -> None:
        # num_tokens: queries
        # balanced: the schedule that runs in the place of FlashInfer's, if any
        self.num_tokens, self._ring, self._arguments, self._shared = num_tokens, ring, arguments, shared
        self._scale, self._ran, self._balanced = shared.value, False, balanced
        super().__init__(wrapper)

    def write(self) -> None:
        """Plan, not waiting for the device; FlashInfer's ``plan`` is spared where only a balanced schedule changes."""
        wrapper, balanced = self.wrapper, self._balanced
        if balanced is None or wrapper.balanced is None:
            self._ring.plan(wrapper.made, sm_scale=self._scale, **self._arguments)
        if balanced is not None:
            if wrapper.balanced is None:
                wrapper.balanced = balanced.place.info_of(wrapper.made)
            balanced.put(wrapper.made, wrapper.balanced, self._scale, captured=wrapper.captured)

    def ready_for(self, scale: float) -> Any:
        """Return FlashInfer's wrapper, planned for this call and scale."""
        made = self.ready()
        if scale != self._scale:
            if self._ran:
                text = f"layers of one group have the softmax scales {self._scale} and {scale}; a plan serves one scale"
                raise ConfigError(text, fields=["scale"])
            # The first layer of this call has a scale that the builder did not know: later builds do.
            self._shared.value = self._scale = scale
            self.put()
        self._ran = True
        return made
