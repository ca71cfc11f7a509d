"""FlashInfer for attn-select: ``FLASHINFER``, ``FLASHINFER_MLA`` and ``FLASHINFER_MLA_SPARSE``."""
