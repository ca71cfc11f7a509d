"""The gate beside what flash-attn-4 refuses by itself on each architecture (``make_fa4_checks.py`` has asked it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import make_fa4_checks
import pytest

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import lookup
from attn_select.testing.toolkit import ask
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN

TESTS = Path(__file__).parents[1]
CHECKS: dict[str, Any] = json.loads((TESTS / "fa4_checks.json").read_text("utf-8"))
FIELDS: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 33},
    "soft cap": {"logits_soft_cap": 30.0},
    "sinks": {"sinks": True},
}
STRICTER = {
    "9.0": {
        *(f"{size} and {size}, paged" for size in (80, 96, 160, 224)),  # rows of pages in waves (facts/builds.py)
        *("64 and 128, paged", "128 and 192, paged", "64 and 256, paged"),  # a V row is as wide as K's in the cache
        "64 and 256, packed",  # does not compile
    },
    "10.0": {"64 and 128, paged"},
    "10.3": {"64 and 128, paged"},
    "11.0": {"64 and 128, paged"},
    "12.0": {
        *(f"{size} and {size}, packed" for size in (160, 192, 224, 264, 512)),
        *("128 and 192, packed", "256 and 128, packed", "64 and 256, packed"),
    },
}
"""What we refuse and the library's Python does not: by our runs on an H200, by the cache's layout, and on 12.0 head
sizes that its Python lets through unchecked."""


def accepted(capability: str, name: str) -> bool:
    """Whether the gate takes a case through flash-attn-4."""
    size, width, paged, feature = make_fa4_checks.cases()[name]
    config = AttentionConfig(
        num_heads=8,
        num_kv_heads=2,
        head_size=size,
        v_head_size=None if width == size else width,
        attn_type="decoder" if paged else "encoder_only",
        **(FIELDS[feature] if feature else {}),
    )
    options = {"provider": "flash-attn-4", "version": 4}
    return isinstance(ask(FLASH_ATTN, config, lookup(capability), "prefill", options=options), BackendPlan)


@pytest.mark.parametrize("capability", CHECKS["answers"])
def test_what_the_library_refuses_is_refused(capability: str) -> None:
    answers = CHECKS["answers"][capability]
    assert set(answers) == set(make_fa4_checks.cases())
    assert not {name for name, refusal in answers.items() if refusal and accepted(capability, name)}


@pytest.mark.parametrize("capability", CHECKS["answers"])
def test_what_it_takes_is_taken_or_has_a_reason(capability: str) -> None:
    taken = {name for name, refusal in CHECKS["answers"][capability].items() if refusal is None}
    assert {name for name in taken if not accepted(capability, name)} == STRICTER[capability]
