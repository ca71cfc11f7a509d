"""The shared operations of ``attn_select.runtime.ops`` in Triton: the entry points of group ``attn_select.ops``.

Each function is asked for a device and returns its namesake of ``op_kernels``, or None: on other devices than CUDA's
(Triton's interpreter, which is slow and rounds FP8 otherwise, counts as none), below compute capability 7.5, and where
triton or its C compiler is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from attn_select.device import Device
from attn_select.environment import Environment
from attn_select_triton.hardware import LIBRARIES, TURING_AND_UP, machine_reasons
from attn_select_triton.launching import on_device

Operation = Callable[..., Any]


@lru_cache(maxsize=16)
def _serves(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    here = Device("cuda", torch.cuda.get_device_capability(device), local=True)
    environment = Environment()
    return (
        TURING_AND_UP.value.accepts(here.compute_capability)
        and all(environment.has(library) for (library,) in LIBRARIES)
        and not machine_reasons(here, environment)
    )


def _served(name: str, device: torch.device) -> Operation | None:
    if not _serves(device):
        return None
    from attn_select_triton import op_kernels  # triton: only where it will run

    operation: Operation = getattr(op_kernels, name)
    return on_device(device, operation)


def reshape_and_cache(device: torch.device) -> Operation | None:
    """Return the cache update of keys and values."""
    return _served("reshape_and_cache", device)


def concat_and_cache_mla(device: torch.device) -> Operation | None:
    """Return the cache update of latents."""
    return _served("concat_and_cache_mla", device)


def gather_cache_mla(device: torch.device) -> Operation | None:
    """Return the gather of cached latents."""
    return _served("gather_cache_mla", device)


def flatten_block_table(device: torch.device) -> Operation | None:
    """Return the flattening of block tables."""
    return _served("flatten_block_table", device)


def merge_attn_states(device: torch.device) -> Operation | None:
    """Return the merge of two partial results."""
    return _served("merge_attn_states", device)


def quantize_fp8(device: torch.device) -> Operation | None:
    """Return the FP8 quantisation."""
    return _served("quantize_fp8", device)
