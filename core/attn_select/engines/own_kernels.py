"""What an engine's own kernel may take over from one of attn-select's that has its name. Knows no engine."""

from __future__ import annotations

from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.rules.rule import PACKAGED


def rests_on_our_times(selection: Selection, backend: str, phase: Phase, instead: str) -> bool:
    """Say whether only what was measured of attn-select's kernels puts a backend before another one.

    Then that place is not for an engine's kernel of the same name, of which nothing was measured. The order of the
    priority rule holds for that kernel too, and so do what a user asked for, by name or by a rule that no times made,
    and the place of what nothing proves behind all others.
    """
    if selection.explicit.get(phase) == backend:
        return False
    rules = [rule for rule in selection.rules if rule.phase in (None, phase)]
    users = [rule for rule in rules if rule.layer > PACKAGED and rule.effect in ("priority", "prefer")]
    if any(backend in rule.backends and rule.measured is None for rule in users):
        return False
    unverified = {c.backend for c in selection.candidates if (plan := c.phases[phase].plan) and plan.unverified}
    if instead in unverified and backend not in unverified:
        return False
    priorities = sorted((rule for rule in rules if rule.effect == "priority"), key=lambda rule: rule.phase is None)
    order = priorities[0].backends if priorities else ()
    return backend in order and instead in order[: order.index(backend)]
