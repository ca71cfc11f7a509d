"""A second stream of a device, for work beside the current one. A CUDA graph may capture it."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's second stream; its programs go first where others wait for multiprocessors too."""
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Give a stream that goes on where the current one is; behind this context the current one waits for it."""
    current, side = torch.cuda.current_stream(device), _stream(device)
    side.wait_stream(current)
    yield side
    current.wait_stream(side)
