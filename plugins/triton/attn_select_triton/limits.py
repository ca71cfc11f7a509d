"""Limits of the kernels that plans, launches and kernels look at alike. Imports neither torch nor Triton."""

from __future__ import annotations

TMA_FROM = (9, 0)
GLUON_CAPABILITY = (9, 0)
MEASURED_CAPABILITY = (9, 0)  # Of the GPUs on which tiles and splits were measured, which ``tuning.toml`` names
TILE_ROWS = 128  # The most query rows (queries x heads of a group) that one decode program holds
# Columns of K and V in one part of the warp-specialised prefill's tiles: 128 bytes, the width of TMA's swizzle.
GLUON_PART = 64
# Sizes of the latent, of the rope part, and of blocks (multiples) that MLA's Gluon kernels were run with.
GLUON_RANKS, GLUON_ROPE, GLUON_BLOCK = (256, 512), 64, 64


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least ``size`` and 16."""
    return max(16, 1 << (size - 1).bit_length())


def two_powers(size: int) -> tuple[int, int]:
    """Return ``size`` as a power of two and a rest, 0 or a smaller power of two from 16 on; (0, 0) where it is not."""
    high = 1 << (size.bit_length() - 1)
    rest = size - high
    return (high, rest) if rest == 0 or (rest >= 16 and rest & (rest - 1) == 0) else (0, 0)


def gluon_lacks(
    capability: tuple[int, int], rank: int, rope: int, block_size: int, dtype: str, cache_dtype: str
) -> str | None:
    """Return what keeps decode's warp-specialised kernel from these layers, as a predicate; None: it takes them.

    Args:
        capability: the device's compute capability.
        rank, rope: sizes of the latent and of the rope part.
        block_size: tokens per block of the cache.
        dtype, cache_dtype: names of the query's and the cache's dtype.
    """
    if capability != GLUON_CAPABILITY:
        return "is for compute capability 9.0"
    if cache_dtype not in (dtype, "fp8_e4m3"):
        return f"reads no {cache_dtype} cache for a {dtype} query"
    if rank not in GLUON_RANKS or rope != GLUON_ROPE:
        accepted = " or ".join(f"{some} + {GLUON_ROPE}" for some in GLUON_RANKS)
        return f"takes latents of {accepted}, not {rank} + {rope}"
    if block_size % GLUON_BLOCK:
        return f"takes blocks of multiples of {GLUON_BLOCK} tokens, not {block_size}"
    return None
