"""The releases of transformers that this adapter was run with; docs/engines.md says what ran where."""

from __future__ import annotations

NOT_SERVED = {"umt5": ("5.17", "5.19", "5.20", "5.21", "5.22")}
"""Releases by model type whose model computes something else with sdpa than with eager attention: in 5.17 the decoder
of UMT5 gets no mask and does not say that it is causal. 5.19 to 5.22 were not tried."""
RELEASES = ("5.17", "5.19", "5.20", "5.21", "5.22", "5.23")
