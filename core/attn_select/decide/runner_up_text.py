"""Texts about runners-up, as lines: the first other backend that could run a phase, and why it lost."""

from __future__ import annotations

from typing import Any

from attn_select.decide.lines import Line, row
from attn_select.decide.outcome import Outcome, RunnerUp, Verdict
from attn_select.decide.time_text import near_text
from attn_select.layer.config import Phase

_LOST = {
    "name": "by name",
    "rank": "by rank: no rule names either",
    "untimed": "by times: it was not timed on such layers",
    "phases": "by serving both phases",
}
"""Why a runner-up lost, where that needs no more words."""


def runner_up_lines(selection: Outcome[Any]) -> list[Line]:
    """Name the runner-up of each phase and why it lost; once where all phases say the same."""
    by_text: dict[tuple[str, str], list[Phase]] = {}
    for phase, found in selection.runners_up.items():
        by_text.setdefault((found.backend, _why_lost(selection, phase, found)), []).append(phase)
    lines: list[Line] = []
    for (name, why), phases in by_text.items():
        where = "" if len(phases) == len(selection.backends) else f" in {phases[0]}"
        lines.append(row("" if lines else "before", (f"{name}{where}", ""), (why, "")))
    return lines


def _why_lost(selection: Outcome[Any], phase: Phase, found: RunnerUp) -> str:
    """Return why a runner-up lost, to follow its name."""
    verdict = selection.verdict(found.backend, phase)
    if found.lost_by == "rule" and found.rule is not None:
        return f" by rule {found.rule.name}{f': {found.rule.because}' if found.rule.because else ''}"
    if found.lost_by == "unverified" and verdict.plan is not None:
        return f", which is unverified: {'; '.join(verdict.plan.unverified)}"
    if found.lost_by == "cache":
        other = next((name for p, name in selection.selected.items() if p != phase and name is not None), "")
        return f", which shares no cache with {other}"
    if found.lost_by == "times":
        little = (
            ", too little to leave the fastest of most surveyed layers" if (verdict.relative_time or 1.0) < 1 else ""
        )
        return f" by times: it would take {_relative_time(verdict)}{little}"
    if found.lost_by == "pair":
        return f" by times: it would take {_relative_time(verdict)}, and prefill and decode together would take longer"
    return f" {_LOST[found.lost_by]}"


def _relative_time(verdict: Verdict) -> str:
    """Return a predicted ratio with what was measured nearby."""
    timing, parts = verdict.timing, ["predicted"]
    if timing is not None and timing.near is not None:
        parts.append(f"{timing.near:.2f} {near_text(timing.near_count)}")
    if timing is not None and timing.stale:
        parts.append("stale")
    return f"{verdict.relative_time or 0.0:.2f} times as long ({', '.join(parts)})"
