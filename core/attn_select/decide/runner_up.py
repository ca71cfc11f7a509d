"""What decided against the first other backend that could run a phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from attn_select.decide.outcome import Candidate, RunnerUp
from attn_select.layer.config import Phase
from attn_select.rules.ranking import Ranking

if TYPE_CHECKING:
    from attn_select.times.choice import EvidenceUsed


def runners_up(
    candidates: Sequence[Candidate],
    rankings: Mapping[Phase, Ranking],
    explicit: Mapping[Phase, str],
    used: EvidenceUsed | None,
    fits: Callable[[Mapping[Phase, str]], bool],
) -> dict[Phase, RunnerUp]:
    """Return the runner-up of each phase that has one."""
    chosen = {p: c for p in rankings for c in candidates if c.phases[p].verdict == "selected"}
    found: dict[Phase, RunnerUp] = {}
    for phase, winner in chosen.items():
        others = [each for each in candidates if each.phases[phase].verdict == "valid"]
        other = min(others, key=lambda each: each.phases[phase].order, default=None)
        if other is None:
            continue
        by_times = used is not None and used.phases[phase].by_times
        if explicit.get(phase) == winner.backend:
            found[phase] = RunnerUp(other.backend, "name")
        elif other.phases[phase].order >= winner.phases[phase].order:
            found[phase] = _by_order(winner, other, phase, rankings[phase], by_times)
        elif not fits({p: (other if p == phase else each).backend for p, each in chosen.items()}):
            found[phase] = RunnerUp(other.backend, "cache")
        elif not by_times:
            found[phase] = RunnerUp(other.backend, "phases")
        else:
            found[phase] = RunnerUp(other.backend, "untimed" if other.phases[phase].relative_time is None else "pair")
    return found


def _by_order(winner: Candidate, other: Candidate, phase: Phase, ranking: Ranking, by_times: bool) -> RunnerUp:
    """Say what put the winner before a backend that stands behind it."""
    verdict = other.phases[phase]
    ordered_by_times = by_times and verdict.rank is not None and other.backend not in ranking.pinned
    if ordered_by_times and verdict.relative_time is not None:
        return RunnerUp(other.backend, "times")
    return RunnerUp(other.backend, *ranking.put_before(winner.backend, other.backend))
