"""``Timing``: how long a candidate takes for the workload's steps of one phase, and what it compares with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from attn_select.times.measurement import Method

Kind = Literal["named file", "measured here", "packaged", "table", "scaled", "roofline estimate"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Where a time comes from, the most trusted first: a file that the user names, the user's own folder, this project's
files, a published table, a GPU with the same multiprocessors. The last is no time but the least that any kernel needs.
"""
Series = tuple[Kind, str, Method | None]
"""Kind, source and method. Times of one series compare with each other, and with no other."""

TIE = 0.02
"""Two times that differ by no more than this share are a tie, however sure they are."""
WEAKER_MARGIN = 0.05
"""What the margin of a time grows by that was measured with other library versions."""
VAGUER = 1.25
"""Predicted times yield to a less trusted series where their margins are so many times as wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A time with everything that it rests on.

    Attributes:
        time_us: mean time of one layer's step over the workload's shapes of the phase, microseconds.
        margin: half the width of the 95 % interval, as a share of ``time_us``; 0 for a roofline.
        share: share of the workload's steps that are of the phase, from 0 to 1.
        kind: where it comes from.
        source: ``measured``, a table's name and version, or ``scaled from`` a GPU.
        method: how it was timed; None for a roofline.
        measured_shapes: how many of the phase's shapes were measured themselves; the rest are predicted from others.
        shapes: how many shapes the workload has of the phase.
        kernel: name of the kernel by phase.
        libraries: version by distribution that it was measured with.
        weaker: why it counts as weaker, in words; empty where it does not.
        files: the files it was read from.
        digest: of the measurements it rests on.
        host_us: of ``time_us``, the host time that each new shape takes (``BackendPlan.host_us_per_shape``).
    """

    time_us: float
    margin: float
    share: float
    kind: Kind
    source: str
    method: Method | None
    measured_shapes: int
    shapes: int
    kernel: Mapping[str, str]
    libraries: Mapping[str, str]
    weaker: str = ""
    files: tuple[str, ...] = ()
    digest: str = ""
    host_us: float = 0.0

    @property
    def series(self) -> Series:
        """What it may be compared with: times of the same series."""
        return self.kind, self.source, self.method

    @property
    def compares(self) -> bool:
        """Whether it says anything about one kernel against another: a roofline does not."""
        return self.kind != "roofline estimate"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        return {
            "time_us": self.time_us,
            "margin": self.margin,
            "kind": self.kind,
            "source": self.source,
            "method": self.method,
            "measured_shapes": self.measured_shapes,
            "shapes": self.shapes,
            "libraries": dict(self.libraries),
            "host_us": self.host_us,
            "weaker": self.weaker or None,
            "files": list(self.files),
        }


def us_figure(time_us: float) -> str:
    """Return microseconds in three digits."""
    return f"{time_us:.3g}" if time_us < 1000 else f"{time_us:.0f}"


def strongest_first(series: Mapping[Series, int]) -> list[Series]:
    """Order series by trust: by kind, graphs before eager launches, then by how many candidates each times."""

    def key(each: Series) -> tuple[Any, ...]:
        kind, source, method = each
        return KINDS.index(kind), method != "graph", -series[each], source

    return sorted(series, key=key)


def yields(trusted: Mapping[str, Timing], other: Mapping[str, Timing]) -> bool:
    """Whether the times of one series count after the times of a less trusted one; both by candidate.

    A few measured batches say little of others. Where the less trusted series knows more of what was asked, its
    margins are narrower. Times of batches that were measured themselves yield to none.
    """
    both = [name for name in trusted if name in other]
    if all(trusted[name].measured_shapes == trusted[name].shapes for name in both):
        return False
    margins = [math.fsum([series[name].margin for name in both]) for series in (trusted, other)]
    return margins[0] > VAGUER * margins[1]


def is_tie(parts: Sequence[tuple[Timing, Timing]], totals: tuple[float, float]) -> bool:
    """Whether two sums of times differ by no more than their combined 95 % margin, or by no more than ``TIE``.

    Args:
        parts: the timings whose margins count and in which the sums differ, side by side. What both have in common
            cancels out.
        totals: the sums, us.
    """
    half_widths = [timing.time_us * timing.share * timing.margin for pair in parts for timing in pair]
    return abs(totals[0] - totals[1]) <= max(math.hypot(*half_widths), TIE * min(totals))


def by_time(
    order: Sequence[str], times: Mapping[str, Timing], rules: Mapping[str, int], margins: bool = True
) -> list[str]:
    """Order candidates by their times of one series, where they compare.

    A candidate moves only past neighbours that have a time too; one without stays where it is, and nothing passes it.
    Of those that tie with the fastest the first by rules comes first, then the same for the rest.

    Args:
        order: the candidates that can run, best first.
        times: by candidate.
        rules: position of every candidate in the order by rules alone.
        margins: whether times within their margins are a tie.
    """
    found: list[str] = []
    run: list[str] = []
    for name in order:
        if name in times:
            run.append(name)
        else:
            found += [*_fastest_first(run, times, rules, margins), name]
            run = []
    return found + _fastest_first(run, times, rules, margins)


def _fastest_first(
    run: Sequence[str], times: Mapping[str, Timing], rules: Mapping[str, int], margins: bool
) -> list[str]:
    left, found = sorted(run, key=rules.__getitem__), []
    while left:
        fastest = times[min(left, key=lambda name: times[name].time_us)]
        best = next(name for name in left if tied(times[name], fastest, margins))
        left.remove(best)
        found.append(best)
    return found


def tied(one: Timing, other: Timing, margins: bool = True) -> bool:
    """Whether two timings of one series and phase are a tie; ``margins`` says whether their margins count."""
    return one is other or is_tie(
        [(one, other)] if margins else [], (one.time_us * one.share, other.time_us * other.share)
    )
