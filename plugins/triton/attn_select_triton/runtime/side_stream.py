"""A second stream of a device, for work beside the current one. A CUDA graph may capture it."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's second stream; its programs go first where others wait for multiprocessors too."""
    return torch.cuda.Stream(device, priority=-1)


class SideStream:
    """The second stream of a device, an index, for all layers of one step: current within ``with``.

    Behind ``with`` the stream that was current at ``fork`` waits for it.
    """

    # Made once a step: events and contexts that torch made in each layer took the host 10 us, and these 3.

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self._index, self._side = device.index, _stream(device)
        self._forked, self._done = torch.cuda.Event(), torch.cuda.Event()

    def fork(self) -> None:
        """Let the second stream go on where the current one is."""
        self._current = torch.cuda.current_stream(self._index)
        self._forked.record(self._current)
        self._forked.wait(self._side)

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._side)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._current)
        self._done.record(self._side)
        self._done.wait(self._current)
