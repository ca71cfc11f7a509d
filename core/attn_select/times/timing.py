"""``Timing``: how long a candidate is predicted to take for the workload's steps of one phase."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A predicted time with what it rests on."""

    time_us: float  # mean time of one layer's step over the workload's shapes of the phase, microseconds
    share: float  # share of the workload's steps that are of the phase, from 0 to 1
    # its mean time as a multiple of the chosen backend's in the nearest measured workloads; None where it was not timed
    # there beside it
    near: float | None = None
    near_count: int = 0  # in how many measured workloads
    # most seconds of a first call in the nearest measured workloads; None where that is not known
    first_call_s: float | None = None
    # most device memory that a call takes beside its arguments in the nearest measured workloads
    workspace_bytes: float | None = None
    host_us: float = 0.0  # of ``time_us``, the host time that each new shape takes (``BackendPlan.host_us_per_shape``)
    stale: str | None = None  # which kernels it is of, where these are others than those that are here

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        data = asdict(self)
        del data["share"]
        return data
