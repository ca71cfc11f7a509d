"""How a KV cache stores numbers: plain casts, FP8 with scales, and the 656-byte token of sparse MLA.

A stored FP8 number stands for ``stored * scale``; writing divides by the scale in float32, saturates and rounds to
nearest even, as vLLM's cache kernels do (``scaled_convert``, csrc/quantization). A kernel that multiplies by the
reciprocal instead may differ by one FP8 step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.layer.layouts import FP8_DS_MLA_BYTES

# The oracle's own, so that it needs no runtime.
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PLAIN_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LATENT, ROPE, TILE = 512, 64, 128
"""Of one token in the 656-byte format: latent width, rope width, and latent values that share one scale."""


def storage_dtype(cache_dtype: str) -> torch.dtype:
    """Return the torch dtype that stores ``cache_dtype`` (``AttentionConfig.cache_dtype``); uint8 for fp8_ds_mla.

    Raises:
        ValueError: the oracle does not know it (nvfp4).
    """
    known = {**PLAIN_DTYPES, **FP8_DTYPES, "fp8_ds_mla": torch.uint8}
    if cache_dtype not in known:
        raise ValueError(f"the oracle does not know the cache dtype {cache_dtype!r}: it knows {', '.join(known)}")
    return known[cache_dtype]


def encode(numbers: Tensor, cache_dtype: str, scale: Tensor | float | None = None) -> Tensor:
    """Return ``numbers`` as a cache stores them: cast, or for FP8 dtypes as uint8 codes of the same shape."""
    # The scale is one number or one per head ``(heads,)``; None is 1. FP8 only.
    dtype = storage_dtype(cache_dtype)
    if cache_dtype not in FP8_DTYPES:
        _no_scale(cache_dtype, scale)
        return numbers.to(dtype)
    limit = torch.finfo(dtype).max
    scaled = numbers.float() / _per_head(scale, numbers).float()
    return scaled.clamp(-limit, limit).to(dtype).view(torch.uint8)


def decode(stored: Tensor, cache_dtype: str, scale: Tensor | float | None = None) -> Tensor:
    """Return float64 numbers from what a cache stores; the inverse of ``encode``, up to its rounding."""
    if cache_dtype not in FP8_DTYPES:
        _no_scale(cache_dtype, scale)
        return stored.double()
    return stored.contiguous().view(FP8_DTYPES[cache_dtype]).double() * _per_head(scale, stored)


def quantize_query(query: Tensor, query_dtype: str, scale: Tensor | float | None = None) -> Tensor:
    """Return the query float64 ``(T, H, D)`` as an FP8 path sees it: quantised, then decoded.

    Args:
        query: ``(T, H, D)``.
        query_dtype: fp8_e4m3 or fp8_e5m2.
        scale: one number, or one per KV head ``(Hkv,)`` for all query heads of its group (FlashAttention-3's
            ``q_descale``). None is 1.
    """
    if isinstance(scale, Tensor) and scale.numel() > 1:
        scale = scale.repeat_interleave(query.shape[1] // scale.numel())
    return decode(encode(query, query_dtype, scale), query_dtype, scale)


def pack_fp8_ds_mla(latent: Tensor, rope: Tensor, *, power_of_two_scales: bool = True) -> Tensor:
    """Pack tokens as sparse FP8 MLA stores them: 512 e4m3, 4 float32 scales of 128 values each, 64 bfloat16.

    The scale of a tile is ``max |x| / 448``. FlashMLA (``quantize_k_cache`` of its tests) and vLLM's fused Triton
    writer take at least 1e-4 and round up to a power of two, so that the product is exact in bfloat16. vLLM's
    ``concat_and_cache_ds_mla`` stores the quotient unrounded, at least the smallest normal float32. Readers take both.

    Args:
        latent: ``(..., 512)``, normalised ``kv_c``.
        rope: ``(..., 64)``, ``k_pe``; cast to bfloat16.
        power_of_two_scales: FlashMLA's rounding of the scales.

    Returns:
        uint8 ``(..., 656)``.
    """
    tiles = latent.float().reshape(*latent.shape[:-1], LATENT // TILE, TILE)
    scales = tiles.abs().amax(dim=-1) / torch.finfo(torch.float8_e4m3fn).max
    if power_of_two_scales:
        scales = torch.exp2(scales.clamp_min(1e-4).log2().ceil())
    else:
        scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
    codes = encode(tiles / scales[..., None], "fp8_e4m3").flatten(-2)
    rope = rope.to(torch.bfloat16).contiguous()
    return torch.cat([codes, scales.contiguous().view(torch.uint8), rope.view(torch.uint8)], dim=-1)


def unpack_fp8_ds_mla(packed: Tensor) -> Tensor:
    """Return the 576 numbers of each 656-byte token, float64 ``(..., 576)``: latent, then rope.

    Products of code and scale are exact; FlashMLA rounds them to bfloat16 before it computes, which loses nothing
    with scales that are powers of two.
    """
    if packed.dtype != torch.uint8 or packed.shape[-1] != FP8_DS_MLA_BYTES:
        raise ValueError(
            f"packed is {packed.dtype} of shape {tuple(packed.shape)}: accepted is uint8 (..., {FP8_DS_MLA_BYTES})"
        )
    codes, scales, rope = packed.split_with_sizes([LATENT, LATENT // TILE * 4, ROPE * 2], dim=-1)
    tiles = decode(codes, "fp8_e4m3").reshape(*codes.shape[:-1], LATENT // TILE, TILE)
    latent = tiles * scales.contiguous().view(torch.float32).double()[..., None]
    return torch.cat([latent.flatten(-2), rope.contiguous().view(torch.bfloat16).double()], dim=-1)


def _per_head(scale: Tensor | float | None, like: Tensor) -> Tensor:
    """Return the scale float64 as ``(1, 1)`` or ``(heads, 1)``, on the device of ``like``."""
    return torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=like.device).reshape(-1, 1)


def _no_scale(cache_dtype: str, scale: Tensor | float | None) -> None:
    if scale is not None:
        raise ValueError(f"scale = {scale}: cache dtype {cache_dtype!r} is stored without a scale, so pass None")
