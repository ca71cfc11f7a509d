"""The releases of vLLM that this adapter was run with; docs/engines.md says what ran where."""

from __future__ import annotations

RELEASES = ("0.26", "0.32", "0.33")
