"""FlashMLA for attn-select: ``FLASHMLA`` and ``FLASHMLA_SPARSE``."""
