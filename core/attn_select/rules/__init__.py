"""Selection rules: ``selector_rules.toml`` files, layered, with the origin of everything kept."""

from __future__ import annotations

from attn_select.rules.layers import RuleSet, load_rules
from attn_select.rules.rule import Rule

__all__ = ["Rule", "RuleSet", "load_rules"]
