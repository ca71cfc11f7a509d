"""What is timed, and what was measured of it."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from attn_select.decide.selection import Selection
from attn_select.errors import BackendError, shorten
from attn_select.layer.config import Phase
from attn_select.times.batch_shape import BatchShape


@dataclass(slots=True)
class Candidate:
    """One backend for one batch."""

    name: str
    # the decision with this backend chosen; None where ``failure`` says why not
    selection: Selection[Any] | None = None
    phases: tuple[Phase, ...] | None = None  # the phases whose backends run; None: all
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class EagerCost:
    """What a step of several layers costs where the host launches every kernel."""

    build_us: float  # host time of building the step's metadata, once a step, microseconds
    host_us: float  # host time of one layer's call, until it returns
    wall_us: float  # time of one layer, from the first call until the device is done, over the number of layers
    reserved_bytes: int  # scratch memory that the plans say their backends keep
    peak_bytes: int | None  # device memory that a call takes beside that, and gives back; None on a CPU

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, times in four digits."""
        return {name: _rounded(each) if isinstance(each, float) else each for name, each in asdict(self).items()}


@dataclass(slots=True)
class Timed:
    """What was measured of one candidate on one batch."""

    backend: str
    kernel: dict[str, str] = field(default_factory=dict)  # kernel name for each phase of the batch
    block_size: int | None = None  # tokens per block of the cache
    samples_us: list[float] = field(default_factory=list)  # time of one layer's step in each round, microseconds
    eager: EagerCost | None = None  # what a step costs that no graph replays; None where ranks share the cache
    method: Literal["graph", "eager"] = "graph"  # ``graph``, or ``eager`` where nothing could be captured
    why_eager: str | None = None
    first_call_s: float = 0.0  # seconds of the first call, compilation included
    error: float | None = None  # relative error against the oracle; None where it was not compared
    unchecked: str | None = None
    bound: float | None = None
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, times in four digits: more were noise."""
        rounded = bool(self.samples_us) and self.failure is None
        return {
            "backend": self.backend,
            "failure": self.failure,
            "kernel": dict(self.kernel),
            "block_size": self.block_size,
            "time_us": _rounded(self.time_us) if rounded else None,
            "spread_us": [*map(_rounded, self.spread_us)] if rounded else None,
            "rounds": len(self.samples_us),
            "method": self.method,
            "why_eager": self.why_eager,
            "eager": None if self.eager is None else self.eager.to_dict(),
            "first_call_s": _rounded(self.first_call_s),
            "error": _rounded(self.error) if self.error is not None and math.isfinite(self.error) else None,
            "bound": self.bound,
            "unchecked": self.unchecked,
        }

    @property
    def time_us(self) -> float:
        """The median round."""
        return statistics.median(self.samples_us)

    @property
    def exact(self) -> bool:
        """Whether the error is within its bound, or was not compared."""
        return self.error is None or self.bound is None or self.error <= self.bound

    @property
    def spread_us(self) -> tuple[float, float]:
        """The quartiles of the rounds."""
        if len(self.samples_us) < 2:
            return self.samples_us[0], self.samples_us[0]
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return low, high

    @property
    def uncertainty(self) -> float:
        """Half the width of the median's 95 % interval, as a share of it."""
        low, high = self.spread_us
        # A normal distribution's quartiles lie 1.349 deviations apart; its median's error is 1.2533 of the mean's.
        return float(1.96 * 1.2533 * (high - low) / 1.349 / len(self.samples_us) ** 0.5 / self.time_us)


@dataclass(slots=True)
class TimedBatch:
    """All candidates on one batch."""

    batch: BatchShape
    roofline_us: float | None  # the least time at the device's measured rates; None where they were not measured
    timed: list[Timed]  # the candidates, the fastest first, those without a time last

    @property
    def ok(self) -> bool:
        """Whether there is a time, and no error is above its bound."""
        return any(each.failure is None for each in self.timed) and all(each.exact for each in self.timed)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        floor, backends = self.roofline_us, []
        for each in self.timed:
            share = None if floor is None or each.failure is not None else floor / each.time_us
            backends.append({**each.to_dict(), "roofline_share": share})
        return {"batch": str(self.batch), "roofline_us": floor, "backends": backends}


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def failure_text(error: BaseException) -> str:
    """Return an exception as one line, that of a backend without its name, which stands beside it."""
    if isinstance(error, BackendError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, MemoryError):
        return str(error) or "not enough memory"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return shorten(f"{type(error).__name__}: {lines[0] if lines else ''}", 200)
