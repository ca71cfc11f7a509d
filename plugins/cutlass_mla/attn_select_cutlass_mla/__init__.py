"""CUTLASS MLA decode on Blackwell for attn-select: ``CUTLASS_MLA``."""
