"""The names under which transformers knows our attention."""

from __future__ import annotations

DENSE = "attn_select"
"""What users give as ``attn_implementation``."""
PAGED = "attn_select_flash"
"""The same during continuous batching, whose engine knows functions that need no mask by "flash" in their names."""
