"""The backends that are known by name even where their plugin is not installed."""

from __future__ import annotations

DISTRIBUTIONS = {
    "FLASH_ATTN": "attn-select-flash-attn",
    "FLASH_ATTN_MLA": "attn-select-flash-attn",
    "FLASHINFER": "attn-select-flashinfer",
    "FLASHINFER_MLA": "attn-select-flashinfer",
    "FLASHINFER_MLA_SPARSE": "attn-select-flashinfer",
    "FLASHMLA": "attn-select-flashmla",
    "FLASHMLA_SPARSE": "attn-select-flashmla",
    "CUTLASS_MLA": "attn-select-cutlass-mla",
    "TRITON_ATTN": "attn-select-triton",
    "TRITON_MLA": "attn-select-triton",
    "PAGED_ATTENTION": "attn-select-triton",
    "TORCH_SDPA": "attn-select-torch",
    "FLEX_ATTENTION": "attn-select-torch",
    "TORCH_MLA": "attn-select-torch",
}
"""Backend name → distribution that registers it."""


def install_command(distribution: str) -> str:
    """Return the command that installs one of this project's plugins from a clone of its repository."""
    return f"pip install ./plugins/{distribution.removeprefix('attn-select-').replace('-', '_')}"
