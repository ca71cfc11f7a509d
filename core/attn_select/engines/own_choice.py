"""Whether an engine's own choice of a backend stays: it does, unless times or a user speak for another one.

Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.rules.rule import PACKAGED

SERVING = "serving"
"""The workload that an engine is chosen for where its user names none."""
LEAST_GAIN = 1.01
"""So many times as long the engine's own choice must be predicted to take, over the whole workload."""


def why_own_stays(selection: Selection, backends: Mapping[Phase, str], own: str | None, measured: bool = True) -> str:
    """Say why the engine's own choice stays where attn-select would choose another one; empty where it does not.

    Args:
        backends: what attn-select would choose, by phase.
        own: attn-select's name of what the engine chooses by itself; None where it has none.
        measured: whether times of ``backends`` are of what would run. They are not of an engine's kernel of that name.
    """
    phases = tuple(backends)
    if all(_asked_for(selection, phase, name) for phase, name in backends.items()):
        return ""
    if own is not None and any(_turned_down(selection, phase, own) for phase in phases):
        return ""
    times = predicted_us(selection, dict.fromkeys(phases, own)), predicted_us(selection, backends)
    if not measured or times[0] is None or times[1] is None:
        return "no times say that it is faster"
    gain = times[0] / times[1]
    return "" if gain >= LEAST_GAIN else f"it is predicted {gain:.3f} times as fast, and {LEAST_GAIN} is the least"


def predicted_us(selection: Selection, backends: Mapping[Phase, str | None]) -> float | None:
    """Return the mean time of a step of the workload by these backends, us; None where kernels here have no times."""
    used, total = selection.evidence, 0.0
    if used is None or any(name in used.stale for name in backends.values()):
        return None
    if len(set(backends.values())) > 1:
        return used.time_us if backends == selection.selected else None
    for phase, name in backends.items():
        if used.phases[phase].share:
            timing = next((c.phases[phase].timing for c in selection.candidates if c.backend == name), None)
            if timing is None:
                return None
            total += used.phases[phase].share * timing.time_us
    return total or None


def _asked_for(selection: Selection, phase: Phase, backend: str) -> bool:
    """Whether the user names a backend for a phase: as the choice, or in a rule that puts it before others."""
    rules = [rule for rule in selection.rules if rule.phase in (None, phase) and rule.layer > PACKAGED]
    named = any(rule.effect in ("prefer", "priority") and backend in rule.backends for rule in rules)
    return named or selection.explicit.get(phase) == backend


def _turned_down(selection: Selection, phase: Phase, backend: str) -> bool:
    """Whether a rule of the user's puts a backend behind others, or forbids it."""
    rules = [rule for rule in selection.rules if rule.phase in (None, phase) and rule.layer > PACKAGED]
    return any(rule.effect in ("avoid", "deny") and backend in rule.backends for rule in rules)
