"""Triton attention kernels for attn-select: ``TRITON_ATTN``, ``TRITON_MLA`` and ``PAGED_ATTENTION``."""
