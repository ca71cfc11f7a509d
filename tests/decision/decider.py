"""Decisions in a situation that a test makes."""

from __future__ import annotations

from typing import Any

from attn_select.backends.registry import Registry
from attn_select.decide.decide import decide
from attn_select.decide.explicit import Choice
from attn_select.decide.selection import Selection
from attn_select.decide.situation import situation_of
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.rules.layers import RuleSet


class Decider:
    """A situation, and decisions in it."""

    def __init__(self, registry: Registry, rules: RuleSet, device: Device, environment: Environment) -> None:
        self.situation = situation_of(registry, rules, device, environment)
        self.names, self.device, self.environment = self.situation.names, device, environment

    def decide(self, config: AttentionConfig, choice: Choice, *rest: Any, **options: Any) -> Selection:
        return decide(self.situation, config, choice, *rest, **options)
