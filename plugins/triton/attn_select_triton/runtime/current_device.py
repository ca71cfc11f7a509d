"""Triton launches on the device that is current, not on its arguments'."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_device(device: torch.device, function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function``, run with ``device`` as the current one; itself where that is no CUDA device."""
    if device.type != "cuda":
        return function
    index = torch.cuda.current_device() if device.index is None else device.index

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.cuda.current_device() == index:
            return function(*args, **kwargs)
        with torch.cuda.device(index):
            return function(*args, **kwargs)

    return run
