"""The releases of transformers that this adapter was run with; docs/engines.md says what ran where."""

from __future__ import annotations

RELEASES = ("5.17", "5.19", "5.20", "5.21", "5.22", "5.23")
