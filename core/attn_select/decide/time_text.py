"""Texts about predicted times, as lines: of the chosen backends, and of every candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_select.decide.lines import HANG, Line, byte_text, row, us_text
from attn_select.decide.outcome import Outcome, Verdict

if TYPE_CHECKING:
    from attn_select.times.choice import EvidenceUsed


def chosen_time_lines(selection: Outcome[Any]) -> list[Line]:
    """Say how long the chosen backends are predicted to take for the workload's steps, and what that rests on."""
    if selection.evidence is None and selection.device.is_cpu:
        return []
    return [row("Time", (_chosen_times(selection, selection.evidence), ""))]


def _chosen_times(selection: Outcome[Any], used: EvidenceUsed | None) -> str:
    if used is None:
        return "not known: no survey takes part, rules rank the backends"
    parts: list[str] = []
    for phase, name in selection.selected.items():
        timing = selection.verdict(name, phase).timing if name is not None else None
        if timing is not None:
            parts.append(f"{phase} {us_text(timing.time_us)} ({_percent(timing.share)} of the steps)")
    mix = ", over the default mix" if selection.workload is None else ""
    survey = f"{used.gpu}'s survey ({used.source}, {used.workloads} workloads, {used.date[:10]})"
    if not parts:
        return f"not known: {survey} has no such layers, rules rank the backends"
    mean = f"{us_text(used.time_us)} per step: " if used.time_us is not None and len(parts) > 1 else ""
    return f"{mean}{', '.join(parts)}, one layer{mix}; predicted by {survey}"


def time_lines(selection: Outcome[Any]) -> list[Line]:
    """Render the time of every candidate, how far it is behind the chosen one, and what was measured nearby."""
    lines: list[Line] = []
    for phase, used in selection.evidence.phases.items() if selection.evidence is not None else ():
        timed = [(c, c.phases[phase]) for c in selection.candidates if c.phases[phase].timing is not None]
        if not timed or selection.evidence is None:
            continue
        head = "by predicted time" if used.by_times else f"by rules: {used.why}"
        title = f"  Times for {phase}"
        margin = f"95 % of ratios are right within a factor of {selection.evidence.margin:.2f}"
        about = f"  {_percent(used.share)} of the steps; ordered {head}; {margin}"
        lines += [[], [(title, "title"), HANG, (about, "dim")]]
        for candidate, verdict in sorted(timed, key=lambda item: item[1].order):
            assert verdict.timing is not None
            rank = "-" if verdict.rank is None else str(verdict.rank)
            ratio = "" if verdict.relative_time is None else f"× {verdict.relative_time:.2f}"
            figures = f"{us_text(verdict.timing.time_us):>9}  {ratio:<7} "
            name = (f"  {rank:>4}  {candidate.backend:<21} ", "selected" if verdict.verdict == "selected" else "")
            lines.append([name, (figures, ""), HANG, (_nearby(verdict), "dim")])
            if verdict.timing.stale:
                lines.append([(" " * 50, ""), HANG, ("stale: ", "warning"), (verdict.timing.stale, "")])
    return lines


def _nearby(verdict: Verdict) -> str:
    """Say what the nearest measured workloads say of a candidate, its cold start and its memory."""
    timing = verdict.timing
    assert timing is not None
    parts = []
    if timing.near is not None and verdict.verdict != "selected":
        parts.append(f"took {timing.near:.2f} times as long {near_text(timing.near_count)}")
    if timing.host_us:
        parts.append(f"{us_text(timing.host_us)} of it host time for each new shape")
    if timing.first_call_s is not None:
        parts.append(f"first call {timing.first_call_s:.2g} s")
    if timing.workspace_bytes:
        parts.append(f"workspace {byte_text(round(timing.workspace_bytes))}")
    return ", ".join(parts)


def near_text(count: int) -> str:
    """Return in how many measured layers a ratio was seen, to follow the ratio."""
    return f"in the {'nearest measured layer' if count == 1 else f'{count} nearest measured layers'}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
