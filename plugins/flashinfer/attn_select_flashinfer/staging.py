"""Pinned memory for the schedules that FlashInfer's ``plan`` copies to the device.

``plan`` of every native wrapper writes its schedule into the wrapper's pinned buffer and copies it asynchronously
(``_pin_memory_int_workspace_buffer``; flashinfer/prefill.py, decode.py and mla/_core.py 0.6.14). Planned again before
the copy is through, the earlier step would run by the later step's schedule. So each plan gets a buffer of which the
last copy is through, which costs no waiting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select_flashinfer.common import FLASHINFER_PYTHON_MLA, INT_WORKSPACE

_ATTRIBUTE = "_pin_memory_int_workspace_buffer"


class _Passed:
    """The event of a device without streams."""

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


def new_event(device: torch.device) -> Any:
    """Return an event that says whether the copies before it are through."""
    return torch.cuda.Event() if device.type == "cuda" else _Passed()  # type: ignore[no-untyped-call]


class PinnedRing:
    """Plans wrappers, each time with a pinned buffer that no copy is still read from.

    Args:
        device: where the wrappers run; copies are ordered on its current stream.

    Attributes:
        buffers: how many there are: one, or more where the host runs steps ahead of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: list[tuple[Tensor, Any]] = []

    @property
    def buffers(self) -> int:
        """Return how many buffers were needed."""
        return len(self._slots)

    def plan(self, wrapper: Any, *args: Any, cleared: int = 0, **kwargs: Any) -> None:
        """Call ``wrapper.plan``.

        Args:
            cleared: bytes at the buffer's start that are zero before it.

        Raises:
            KernelMismatchError: the wrapper keeps no such buffer (MLA's since 0.7.0): nothing guards its copies.
        """
        if not hasattr(wrapper, _ATTRIBUTE):
            text = f"{type(wrapper).__name__} of the installed FlashInfer has no {_ATTRIBUTE}"
            raise KernelMismatchError(text, hint=FLASHINFER_PYTHON_MLA.install)
        buffer, event = self._free()
        setattr(wrapper, _ATTRIBUTE, buffer)
        if cleared:
            buffer[:cleared].zero_()
        wrapper.plan(*args, **kwargs)
        event.record(torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None)

    def _free(self) -> tuple[Tensor, Any]:
        for slot in self._slots:
            if slot[1].query():
                return slot
        pinned = torch.empty(INT_WORKSPACE, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._slots.append((pinned, new_event(self._device)))
        return self._slots[-1]
