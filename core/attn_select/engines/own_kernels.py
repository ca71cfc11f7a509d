"""What an engine's own kernel may take over from one of attn-select's that has its name. Knows no engine."""

from __future__ import annotations

from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.rules.rule import PACKAGED


def rests_on_our_times(selection: Selection, backend: str, phase: Phase, instead: str) -> bool:
    """Say whether only what was measured of attn-select's kernels puts a backend before another one.

    Then that place is not for an engine's kernel of the same name, of which nothing was measured. What a user asked for
    by name holds for that kernel too. So do rules, and so does the place of unproved backends behind all others.
    """
    if selection.explicit.get(phase) == backend:
        return False
    rules = [rule for rule in selection.rules if rule.phase in (None, phase)]
    named = [rule for rule in rules if rule.effect == "prefer" or (rule.effect == "priority" and rule.layer > PACKAGED)]
    if any(backend in rule.backends for rule in named):
        return False
    unverified = {c.backend for c in selection.candidates if (plan := c.phases[phase].plan) and plan.unverified}
    if instead in unverified and backend not in unverified:
        return False
    avoided = {name for rule in rules if rule.effect == "avoid" for name in rule.backends}
    if instead in avoided and backend not in avoided:
        return False
    if any(instead in rule.backends for rule in rules if rule.effect == "prefer"):
        return True
    priorities = sorted((rule for rule in rules if rule.effect == "priority"), key=lambda rule: rule.phase is None)
    order = priorities[0].backends if priorities else ()
    # What the priority does not list stands behind it.
    return instead in (order[: order.index(backend)] if backend in order else order)
