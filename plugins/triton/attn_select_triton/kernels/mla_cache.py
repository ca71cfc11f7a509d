"""Writing a paged cache of latents."""

from __future__ import annotations

from torch import Tensor

from attn_select_triton.kernels.cache import write_kv


def concat_and_cache_mla(
    kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, scale: Tensor
) -> None:
    """Write latents and rope parts to their slots; a token with slot -1 is skipped.

    To the kernel of ``write_kv`` they are the keys and the values of one head that lie side by side.

    Args:
        kv_c_normed: ``(T, R)``, last dimension contiguous; k_pe ``(T, P)`` likewise.
        kv_cache: ``(num_blocks, block_size, R + P)``.
        slot_mapping: int64 ``(T,)``.
        scale: float32 on the device, ``()``, read where the cache is FP8, which stores ``x / scale``.
    """
    rank = kv_c_normed.shape[1]
    latents, ropes = kv_cache[..., :rank].unsqueeze(2), kv_cache[..., rank:].unsqueeze(2)
    write_kv(kv_c_normed.unsqueeze(1), k_pe.unsqueeze(1), latents, ropes, slot_mapping, scale, scale)
