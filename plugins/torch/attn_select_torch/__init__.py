"""Attention in plain PyTorch for attn-select: ``TORCH_SDPA``, ``FLEX_ATTENTION`` and ``TORCH_MLA``."""
