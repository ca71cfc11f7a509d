"""``Measurement``: how long one backend took for one layer's step, with everything that is needed to judge the figure.

In a file it is one line of JSON (``to_line``, ``from_line``). A file of measurements has one on each line and no
header, so that files can be appended to, concatenated and searched line by line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from attn_select.errors import MeasurementError, UnknownNameError, show
from attn_select.layer.config import PHASES

VERSION = 1
"""Of the line's format, its key ``v``."""
Method = Literal["graph", "eager", "table"]
METHODS: tuple[Method, ...] = get_args(Method)
LEAST_US, MOST_US = 1e-3, 1e10
"""A clock cycle takes longer than the first, and nobody waits three hours for a layer: what is outside is a mistake."""
MEASURED = "measured"
"""The ``source`` of times that ``attn-select bench`` and ``tune`` measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One backend's time for one layer's step, the write of the step's keys and values into the cache included.

    Attributes:
        gpu: the full name as the driver says it (``NVIDIA H200``), or what ``cpu`` is.
        compute_capability: ``9.0``, or ``cpu``.
        driver: version of the NVIDIA driver; None without one, and where a table does not say.
        libraries: version by distribution: the kernel's libraries, torch, and the plugin.
        backend: its name.
        kernel: the stable name of the plan's kernel for each phase that the batch has.
        config: the fields of the layer that change a kernel's time (``attn_select.times.timed_layer``).
        block_size: tokens per block of the cache; None where a table does not say, and without a cache.
        batch: the batch shape as text (``attn_select.times.batch_shape``).
        time_us: median time of one layer's step, microseconds.
        spread_us: the quartiles (25 %, 75 %) of the rounds' times, microseconds; None where a table has none.
        rounds: how many times ``time_us`` is the median of; 0 where a table does not say.
        method: ``graph`` (replayed from a CUDA graph), ``eager`` (launched by the host, so host time may count too),
            ``table`` (as its publisher measured it).
        source: ``measured``, or the table with its version (``aiconfigurator-core 0.12.0 vllm 0.11.0``).
        error: largest relative error against the float64 oracle; None where it was not compared.
        date: when it was measured, ISO 8601; empty where a table does not say.
    """

    gpu: str
    compute_capability: str
    driver: str | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    backend: str
    kernel: Mapping[str, str]
    config: Mapping[str, Any]
    block_size: int | None = None
    batch: str
    time_us: float
    spread_us: tuple[float, float] | None = None
    rounds: int = 0
    method: Method
    source: str = MEASURED
    error: float | None = None
    date: str = ""

    def to_line(self) -> str:
        """Return the measurement as one line of JSON, without a line end."""
        data: dict[str, Any] = {"v": VERSION}
        for name in _NAMES:
            value = getattr(self, name)
            if value != _DEFAULTS.get(name, _REQUIRED):
                data[name] = value if not isinstance(value, Mapping) else dict(value)
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> Measurement:
        """Read a line of JSON.

        Raises:
            MeasurementError: the line is no JSON object, has another version, lacks a field, has an unknown one, or a
                value is not accepted. Names the field, its value and what is accepted.
        """
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            raise MeasurementError(f"not a line of JSON: {show(line, 60)}") from None
        if not isinstance(data, dict):
            raise MeasurementError(f"accepted is a JSON object, got {show(data, 60)}")
        version = data.pop("v", None)
        if version is None or type(version) is not int or version != VERSION:
            raise MeasurementError(f"v = {show(version)}: accepted is {VERSION}, the version of the format")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Make a measurement of plain data; errors as in ``from_line``."""
        for name in data:
            if name not in _CHECKS:
                unknown = UnknownNameError("field", name, _NAMES)
                raise MeasurementError(unknown.message, hint=unknown.hint)
        given = dict(data)
        for name, (holds, accepted) in _CHECKS.items():
            if name not in given:
                if name not in _DEFAULTS:
                    raise MeasurementError(f"{name} is missing: accepted is {accepted}")
            elif not holds(given[name]):
                raise MeasurementError(f"{name} = {show(given[name])}: accepted is {accepted}")
        if given.get("spread_us") is not None:
            given["spread_us"] = tuple(given["spread_us"])
        return cls(**given)


_REQUIRED = object()
_NAMES = tuple(each.name for each in fields(Measurement))
_DEFAULTS: Mapping[str, Any] = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory()
    for each in fields(Measurement)
    if (each.default, each.default_factory) != (MISSING, MISSING)
}


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _is_count(least: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and value >= least


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and LEAST_US <= value <= MOST_US


def _is_spread(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_time, value)) and value[0] <= value[1]


def _is_texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_text(k) and _is_text(v) for k, v in value.items())


def _or_none(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or holds(value)


def _is_kernel(value: object) -> bool:
    return _is_texts(value) and bool(value) and set(value) <= set(PHASES)  # type: ignore[call-overload]


def _is_error(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "gpu": (_is_text, "the full name of the GPU"),
    "compute_capability": (_is_text, "a compute capability such as '9.0', or 'cpu'"),
    "driver": (_or_none(_is_text), "the driver's version, or null"),
    "libraries": (_is_texts, "an object of versions by distribution"),
    "backend": (_is_text, "the name of a backend"),
    "kernel": (_is_kernel, f"an object of kernel names by phase ({', '.join(PHASES)})"),
    "config": (lambda value: isinstance(value, Mapping) and bool(value), "an object with the layer's fields"),
    "block_size": (_or_none(_is_count(1)), "an integer from 1, or null"),
    "batch": (_is_text, "a batch shape such as '64q1s4k'"),
    "time_us": (_is_time, f"a number of microseconds, {LEAST_US:g} to {MOST_US:g}"),
    "spread_us": (_or_none(_is_spread), "two times in microseconds, the smaller first, or null"),
    "rounds": (_is_count(0), "an integer from 0"),
    "method": (lambda value: value in METHODS, " or ".join(METHODS)),
    "source": (_is_text, f"{MEASURED!r}, or a table's name and version"),
    "error": (_or_none(_is_error), "a number from 0, or null"),
    "date": (lambda value: value == "" or _is_text(value), "a date in ISO 8601"),
}
"""Per field whether a value is accepted, and what is. Text has no line breaks and no escape codes: it is printed."""
