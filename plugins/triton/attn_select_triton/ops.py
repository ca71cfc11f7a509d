"""The shared operations of ``attn_select.runtime.ops`` in Triton: the entry points of group ``attn_select.ops``.

Each function is asked for a device and returns its namesake of ``runtime.op_kernels``. It returns None on other devices
than CUDA's, below compute capability 7.5, and where Triton or its C compiler is missing. Triton's interpreter is not
served: it is slow, and rounds FP8 in another way. Importing this module imports neither torch nor Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select_triton.facts.triton_support import COMPILER_VARIABLES, LIBRARIES, TURING_AND_UP, machine_reasons

if TYPE_CHECKING:
    import torch

Operation = Callable[..., Any]


def _serves(device: torch.device) -> bool:
    """Whether Triton compiles for a device here and now; core asks once per operation and device."""
    if device.type != "cuda":
        return False
    import torch  # only here: who asks has imported it

    here = Device("cuda", torch.cuda.get_device_capability(device), local=True)
    environment = Environment(variables={name: os.environ[name] for name in COMPILER_VARIABLES if name in os.environ})
    return (
        TURING_AND_UP.value.accepts(here.compute_capability)
        and all(environment.has(library) for (library,) in LIBRARIES)
        and not machine_reasons(here, environment)
    )


def _served(name: str, device: torch.device) -> Operation | None:
    if not _serves(device):
        return None
    from attn_select_triton.runtime import op_kernels  # imports Triton: only where it runs
    from attn_select_triton.runtime.current_device import on_device

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


def pack_attn_states(device: torch.device) -> Operation | None:
    """Return the packing of a partial result that is sent to other ranks."""
    return _served("pack_attn_states", device)


def merge_rank_states(device: torch.device) -> Operation | None:
    """Return the merge of several ranks' partial results."""
    return _served("merge_rank_states", device)


def gather_rank_heads(device: torch.device) -> Operation | None:
    """Return the gathering of query heads through the ranks' memory."""
    return _served("gather_rank_heads", device)


def merge_rank_memory(device: torch.device) -> Operation | None:
    """Return the merge of the partial results in the ranks' memory."""
    return _served("merge_rank_memory", device)


def quantize_fp8(device: torch.device) -> Operation | None:
    """Return the FP8 quantisation."""
    return _served("quantize_fp8", device)


def concat_and_quantize_mla_q(device: torch.device) -> Operation | None:
    """Return the FP8 quantisation of a query in two parts."""
    return _served("concat_and_quantize_mla_q", device)


def indexer_k_quant_and_cache(device: torch.device) -> Operation | None:
    """Return the cache update of the sparse indexer's keys."""
    return _served("indexer_k_quant_and_cache", device)


def slots_in_front(device: torch.device) -> Operation | None:
    """Return the ordering of the slots that sparse MLA attends to."""
    return _served("slots_in_front", device)


def indexer_topk(device: torch.device) -> Operation | None:
    """Return the sparse indexer's choice of tokens."""
    return _served("indexer_topk", device)


def causal_conv(device: torch.device) -> Operation | None:
    """Return the convolution of layers that keep a state."""
    return _served("causal_conv", device)
