"""FlashAttention 2 and 3 for attn-select: ``FLASH_ATTN`` and ``FLASH_ATTN_MLA``."""
