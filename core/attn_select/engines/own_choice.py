"""Whether an engine's own choice of a backend stays: it does, unless times or a user speak for another one.

Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.rules.rule import PACKAGED

SERVING = "serving"
"""The workload that an engine is chosen for where its user names none."""
LEAST_GAIN = 1.01
"""Another backend runs where the engine's own choice is predicted to take at least this many times as long per step."""
LEAST_GAIN_OF_DECODES = 1.03
"""The same where decodes alone are chosen for, those of dense MLA. An engine's own backend may read more as decodes
than times know: vLLM's FLASH_ATTN_MLA does the last 512 tokens of a prompt (its ``reorder_batch_threshold``). By vLLM
0.26 on an H200, layers of 16 heads, predicted 1.06, served 1.02 times as fast, and of 128, predicted 1.005, 0.94."""


@dataclass(frozen=True, slots=True)
class OwnStays:
    """Why the engine's own choice stays where attn-select would choose another one."""

    gain: float | None  # how many times as fast the other one is predicted; None where no times compare the two
    least: float = LEAST_GAIN  # the gain that would be needed

    def text(self, other: str) -> str:
        """Return it in words; ``other`` is the engine's name of what does not run."""
        if self.gain is None:
            return f"no times say that {other} is faster"
        return f"{other} is predicted {self.gain:.3f} times as fast, and {self.least} is the least"


def why_own_stays(
    selection: Selection, backends: Mapping[Phase, str], own: str | None, measured: bool = True
) -> OwnStays | None:
    """Say why the engine's own choice stays where attn-select would choose another one; None where it does not."""
    # ``backends`` is what attn-select would choose, ``own`` its name of what the engine chooses by itself, None where
    # it has none. ``measured``: both backends' times are of the kernels that would run; a kernel of the engine's own
    # that has the name of one of attn-select's was never timed.
    others = {phase: name for phase, name in backends.items() if name != own} or backends
    if any(_asked_for(selection, phase, name) for phase, name in others.items()):
        return None
    if own is not None and any(_turned_down(selection, phase, own) for phase in others):
        return None
    kept_out = any(rule.effect == "evidence" and rule.phase in (None, *backends) for rule in selection.rules)
    own_us, other_us = predicted_us(selection, dict.fromkeys(backends, own)), predicted_us(selection, backends)
    if kept_out or not measured or own_us is None or other_us is None:
        return OwnStays(None)
    rest_us = _rest_us(selection, backends)
    gain = (own_us + rest_us) / (other_us + rest_us)
    least = LEAST_GAIN if "prefill" in backends else LEAST_GAIN_OF_DECODES
    return None if gain >= least else OwnStays(gain, least)


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


def _rest_us(selection: Selection, backends: Mapping[Phase, str]) -> float:
    """Return the time of a mean step in the phases that these backends do not serve, by the fastest backend, us.

    An engine may choose for MLA's prefills and decodes apart, and a gain that is small beside the step is none.
    """
    used, total = selection.evidence, 0.0
    for phase, weighed in used.phases.items() if used is not None else ():
        timings = [c.phases[phase].timing for c in selection.candidates if phase in c.phases]
        times = [timing.time_us for timing in timings if timing is not None]
        if phase not in backends and times:
            total += weighed.share * min(times)
    return total


def _asked_for(selection: Selection, phase: Phase, backend: str) -> bool:
    """Whether the user names a backend for a phase: as the choice, or in a rule that puts it before others."""
    return selection.explicit.get(phase) == backend or _names(selection, phase, backend, ("prefer", "priority"))


def _turned_down(selection: Selection, phase: Phase, backend: str) -> bool:
    """Whether a rule of the user's puts a backend behind others, or forbids it."""
    return _names(selection, phase, backend, ("avoid", "deny"))


def _names(selection: Selection, phase: Phase, backend: str, effects: tuple[str, ...]) -> bool:
    """Whether a rule of the user's with one of these effects names a backend for a phase."""
    rules = [rule for rule in selection.rules if rule.layer > PACKAGED and rule.phase in (None, phase)]
    return any(rule.effect in effects and backend in rule.backends for rule in rules)
