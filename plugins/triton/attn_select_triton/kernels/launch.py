"""Launch parameters of a shape class on a GPU, by ``tuning.toml``; and how K and V are described to TMA."""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_select.machine.device import find_gpu
from attn_select_triton.kernels.descriptors import Descriptors
from attn_select_triton.limits import GLUON_CAPABILITY, GLUON_PART, TILE_ROWS, TMA_FROM
from attn_select_triton.limits import power_of_two as power_of_two
from attn_select_triton.limits import two_powers as two_powers
from attn_select_triton.tuning import Gpu, Tile, decode_splits, find_tile, tile_of

Launch = Tile
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
COMPUTE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# Pointers into slices of a step's tensors, aligned to 16 bytes in one step and not in another: one kernel for both.
SLICED = [
    "table_ptr", "query_start_loc_ptr", "key_start_loc_ptr", "seq_lens_ptr", "slot_ptr",
    "lse_ptr", "prefix_lse_ptr", "suffix_lse_ptr", "slopes_ptr", "sinks_ptr", "ranges_ptr", "tree_ptr",
    "k_scale_ptr", "v_scale_ptr", "out_scale_ptr",
]  # fmt: skip
PRECISION = "ieee"  # Of float32 products: exact, on the FMA units. Products of the other dtypes are not affected.


@dataclass(frozen=True, slots=True)
class Terms:
    """What attention adds to plain softmax."""

    causal: bool = True  # a row sees no key behind itself
    window: int = 0  # tokens that a row sees to each side it may look at, itself included; 0: all
    soft_cap: float = 0.0  # ``cap * tanh(score / cap)``; 0: none
    slopes: Tensor | None = None  # ALiBi, float32 ``(H,)``
    sinks: Tensor | None = None  # ``(H,)`` logits that count in the denominator only
    # int32 ``(B, R, 2)``, inclusive positions whose tokens see each other; first > last where unused
    ranges: Tensor | None = None

    def of_heads(self, some: slice) -> Terms:
        """Return the terms of some heads of the query."""
        slopes, sinks = (None if term is None else term[some] for term in (self.slopes, self.sinks))
        return replace(self, slopes=slopes, sinks=sinks)


PLAIN = Terms()


@lru_cache(maxsize=16)
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return a CUDA device's compute capability; (0, 0) for the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@lru_cache(maxsize=16)
def sm_count(device: torch.device) -> int:
    """Return a CUDA device's multiprocessors; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=16)
def gpu_of(device: torch.device) -> Gpu:
    """Return a device as the choices of tiles and splits see it."""
    known = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Gpu(capability_of(device), sm_count(device), None if known is None else known.bandwidth_gbps)


def compute_dtype(query: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """Return the dtype that K, V and the query are multiplied in."""
    # FP8 converts to float16 in one instruction for two numbers and to bfloat16 in several, so a bfloat16 query over an
    # FP8 cache is multiplied as float16; both FP8 formats fit it exactly.
    return tl.float16 if cache in FP8 and query == torch.bfloat16 else COMPUTE[query]


def prefill_launch(
    capability: tuple[int, int], width: int, dtype: torch.dtype, described: bool, paged: bool, keys: int
) -> Launch:
    """Return the launch of a prefill."""
    # width: the larger of QK's and V's head size; twice that where float32 makes tiles twice as large.
    # described: K and V come through tensor descriptors (TMA).
    # paged: over a block table, whose lookup takes stages of the pipeline too.
    # keys: the longest request's.
    return tile_of(
        "prefill", capability, width=width, dtype=_name(dtype), described=described, paged=paged, keys=keys
    )  # fmt: skip


def hopper_prefill_launch(head_size: int, value_size: int) -> Launch | None:
    """Return the launch of the warp-specialised prefill for these head sizes; None: it is not for them."""
    parts, v_parts = -(-head_size // GLUON_PART), -(-value_size // GLUON_PART)
    return find_tile("prefill_hopper", GLUON_CAPABILITY, parts=parts, v_parts=v_parts)


@lru_cache(maxsize=4096)
def decode_launch(
    capability: tuple[int, int], rows: int, width: int, dtype: torch.dtype, cache: torch.dtype, programs: float
) -> Launch:
    """Return the launch of a decode."""
    # rows: query rows per KV head, heads of a group x tokens.
    # width: the larger of QK's and V's head size.
    # programs: unsplit programs per SM.
    block_m = min(TILE_ROWS, power_of_two(rows))
    kind = "fp8" if cache in FP8 else _name(cache)
    tile = tile_of(
        "decode", capability, rows=block_m, width=width, dtype=_name(dtype), cache=kind, programs=programs
    )  # fmt: skip
    return replace(tile, block_m=min(block_m, tile.block_m))


@lru_cache(maxsize=4096)
def num_splits_for(
    programs: int, keys: int, gpu: Gpu, launch: Launch, key_bytes: int, rows: int, apart: bool = False
) -> int:  # fmt: skip
    """Return into how many splits a decode cuts the keys."""
    # programs: requests x KV heads x row tiles, unsplit.
    # keys: the longest request's, or its window's.
    # key_bytes: of a key and its value, of one KV head.
    return decode_splits().of_equal(programs, keys, gpu, launch, key_bytes, rows, apart)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cache_strides(
    key: Tensor, value: Tensor, paged: bool
) -> tuple[int, int, tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Return block size, elements packed together in a classic K (else 0), and strides ``(block, token, head, column)``
    of K and of V."""
    if key.ndim == 5:
        block, head, column, token, _ = key.stride()
        return key.shape[3], key.shape[4], (block, token, head, column), _four(value)
    return (key.shape[1] if paged else 1), 0, _four(key), _four(value)


def _four(tensor: Tensor) -> tuple[int, int, int, int]:
    token, head, column = tensor.stride()[-3:]
    return (tensor.stride(0) if tensor.ndim == 4 else 0), token, head, column


@dataclass(frozen=True, slots=True)
class Described:
    """K or V as a matrix of rows for TMA."""

    boxes: Descriptors  # descriptors in boxes of ``(block_n, columns)``
    # shape, strides: of the matrix
    shape: tuple[int, int]
    strides: tuple[int, int]
    page_rows: int  # rows from a block to the next
    # head_rows, head_columns: rows and columns from a head to the next; one of them is 0
    head_rows: int
    head_columns: int
    more_rows: int  # rows beside the rows of all pages or tokens, may be negative

    def over(self, tensor: Tensor, boxes: Descriptors | None = None) -> Any:
        """Return the descriptor, or one in other ``boxes``, over a tensor of another address or first dimension."""
        step = self.page_rows if tensor.ndim == 4 else 1
        return (boxes or self.boxes).over(tensor, step * tensor.shape[0] + self.more_rows)


def describable(tensor: Tensor, dtype: torch.dtype, block_n: int, capability: tuple[int, int]) -> bool:
    """Whether TMA can read K or V ``([num_blocks, block_size,] heads, size)``: alignment, strides, whole tiles."""
    size, paged = tensor.element_size(), tensor.ndim == 4
    token, head, column = tensor.stride()[-3:]
    # A matrix has one distance between rows, a token's: heads lie within a row or whole rows apart, and blocks whole
    # rows apart. Bases and distances are multiples of 16 bytes.
    outer = max(token, head)
    return (
        capability >= TMA_FROM
        and tensor.numel() > 0
        and tensor.dtype == dtype
        and column == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride * size % 16 == 0 for stride in tensor.stride()[:-1])
        and min(token, head) >= tensor.shape[-1]
        and (token >= head or head % token == 0)
        and (not paged or (tensor.shape[1] % block_n == 0 and tensor.stride(0) % min(outer, token) == 0))
    )


def describe(tensor: Tensor, block_n: int, columns: int) -> Described:
    """Return K or V, which must be ``describable``, as a matrix; boxes take ``columns`` of its columns."""
    tokens, heads, size = tensor.shape[-3:]
    token, head = tensor.stride()[-3:-1]
    page_rows = tensor.stride(0) // token if tensor.ndim == 4 else 0
    rows = (tensor.shape[0] - 1) * page_rows + tokens if tensor.ndim == 4 else tokens
    if token >= head:  # a row holds the heads of a token
        shape, head_rows, head_columns = (rows, (heads - 1) * head + size), 0, head
    else:  # a row is one head of one token, and heads lie many rows apart
        shape, head_rows, head_columns = (rows + (heads - 1) * (head // token), size), head // token, 0
    boxes = Descriptors(TensorDescriptor(tensor, list(shape), [token, 1], [block_n, columns]))
    more_rows = shape[0] - (page_rows if tensor.ndim == 4 else 1) * len(tensor)
    return Described(boxes, shape, (token, 1), page_rows, head_rows, head_columns, more_rows)
