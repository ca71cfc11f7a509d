"""Makes of a survey's records what ``attn_select.times.prediction`` reads: kriging of each backend's times.

For each backend of a family, ``log(time / floor)`` is a level plus a Gaussian process over the features, with an
exponential kernel. All backends of a family share one scale for each feature, an amplitude and a noise; they are the
most likely ones, with a prior that scales are alike unless the times say otherwise.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from attn_select.errors import MeasurementError
from attn_select.layer.layer_config import layer_of
from attn_select.layer.state import RECURRENCES
from attn_select.machine.device import lookup
from attn_select.machine.files import replace_file
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.features import Rates, StepFeatures
from attn_select.times.prediction import VERSION, family_of, features_of
from attn_select_measure.survey_records import Record

Array = NDArray[np.float64]
Done = Callable[[], None]  # Told after each fit
LEAST = 5  # Times that a backend needs in a family to be predicted
_LEVEL = 0.25  # Variance of a backend's level: half a logarithm
# Logarithm of a feature's scale (of one standard deviation of it) at the start, and the prior of it.
_START, _PRIOR, _PRIOR_WIDTH = -1.5, -2.0, 0.5
_AMPLITUDE, _NOISE, _NOISE_WIDTH = 0.06, 0.03**2, 0.7
_STEPS = 25
_DIGITS = 4
MEASURED = ("times_us", "first_call_s", "workspace_bytes", "host_us")  # What a file has of each workload and backend
_FOLDS = 10


@dataclass(frozen=True, slots=True)
class Timed:
    """One workload with its features, and what was measured of each backend; layers of a group have the same heads and
    sizes."""

    group: str
    features: StepFeatures
    measured: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Scales:
    """What the backends of a family share: names of the features that differ, their scales, amplitude and noise."""

    names: Sequence[str]
    scales: Array
    amplitude: float
    noise: float

    def places(self, timed: Sequence[Timed]) -> Array:
        """Return where workloads lie."""
        return np.array([[each.features.values[name] for name in self.names] for each in timed]) * self.scales

    def covariance(self, one: Array, other: Array) -> Array:
        """Return how the deviations of workloads go together, without noise and level."""
        return np.asarray(self.amplitude * np.exp(-np.sqrt(_squares(one, other))))

    def weights(self, places: Array, deviations: Array) -> Array:
        """Return the weights of measured deviations from the floor, in logarithms."""
        covariance = self.covariance(places, places) + _LEVEL + self.noise * np.eye(len(places))
        return np.asarray(np.linalg.solve(covariance, deviations))


def fit_survey(records: Sequence[Record], done: Done = lambda: None) -> dict[str, Any]:
    """Return what a survey's file holds, of its records."""
    rates, families = _rates(records), dict[str, dict[str, Any]]()
    for name, timed in _by_family(records, rates).items():
        families[name] = _of_family(timed)
        done()
    families = {name: each for name, each in families.items() if each["backends"]}
    if not families:
        raise MeasurementError(f"no backend has {LEAST} times in this survey")
    last: dict[str, dict[str, Any]] = {}
    for record in records:
        for each in record["timed"]:
            if each["failure"] is None and each["backend"] in each["fingerprint"]:
                known = last.get(each["backend"], {"date": "", "times": 0})
                newer = known if each["date"] < known["date"] else {"fingerprint": each["fingerprint"][each["backend"]]}
                date = max(each["date"], known["date"])
                last[each["backend"]] = {**known, **newer, "date": date, "times": known["times"] + 1}
    predicted = {name for family in families.values() for name in family["backends"]}
    return {
        "v": VERSION,
        "gpu": records[0]["gpu"],
        "date": max(each["date"] for each in last.values()),
        "workloads": len(records),
        "rates": {"bytes_per_us": rates.bytes_per_us, "flops_per_us": rates.flops_per_us, "sm_count": rates.sm_count},
        "margin": round(_margin(records, families, rates, done), 3),
        "backends": {name: each for name, each in sorted(last.items()) if name in predicted},
        "families": families,
    }


def extended(data: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return a survey's data with more workloads of its GPU; scales, amplitude and noise stay as they were fitted."""
    # Backends that the survey has no times of are left out.
    rates = Rates(**data["rates"])
    families = dict(data["families"])
    for name, timed in _by_family(records, rates).items():
        if name not in families:
            continue
        old = families[name]
        features = old["features"]
        scales = np.array([each["scale"] for each in features.values()])
        fitted = Scales([*features], scales, old["amplitude"], old["noise"])
        new = _family(timed, fitted, [*old["backends"]])
        families[name] = _solved(
            {
                **old,
                "floors_us": old["floors_us"] + new["floors_us"],
                "features": {
                    feature: {**each, "values": each["values"] + new["features"][feature]["values"]}
                    for feature, each in features.items()
                },
                "backends": {
                    backend: {key: known[key] + new["backends"][backend][key] for key in MEASURED}
                    for backend, known in old["backends"].items()
                },
            },
            fitted,
        )
    dates = [each["date"] for record in records for each in record["timed"]]
    more = {"workloads": data["workloads"] + len(records), "date": max([data["date"], *dates])}
    return {**data, **more, "families": families}


def save(data: Mapping[str, Any], path: Path) -> None:
    """Write a survey's file in one step; the same data are the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, gzip.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), mtime=0))


def _rates(records: Sequence[Record]) -> Rates:
    """Return the rates that the GPU reached: the medians over the survey's runs."""
    device = lookup(records[0]["gpu_name"])
    if device.sm_count is None:
        raise MeasurementError(f"gpu_name = {device.name!r}: expected a GPU whose multiprocessors are known")
    copy, tflops = (float(np.median([record["rates"][name] for record in records])) for name in ("copy_gbps", "tflops"))
    return Rates(_rounded(copy * 1e3), _rounded(tflops * 1e6), device.sm_count)


def timed_of(record: Record, rates: Rates) -> Timed:
    """Return a record's workload with its features."""
    config, batch = layer_of(record["config"]), parse_batch_shape(record["batch"])
    words = record["kind"].split(" ")
    group = " ".join(words[:3] if words[0] in ("mla", *RECURRENCES) else words[:2])  # the same heads and sizes
    measured = {
        each["backend"]: {
            "times_us": each["time_us"],
            "first_call_s": each["compile_s"],
            "workspace_bytes": each["eager"]["reserved_bytes"] + (each["eager"]["peak_bytes"] or 0),
            "host_us": each["eager"]["host_us"],
        }
        for each in record["timed"]
        if each["failure"] is None and each["time_us"] and each["backend"] in each["fingerprint"]
    }
    return Timed(group, features_of(config, batch, rates), measured)


def _by_family(records: Sequence[Record], rates: Rates) -> dict[str, list[Timed]]:
    found: dict[str, list[Timed]] = {}
    for record in records:
        family = family_of(layer_of(record["config"]))
        timed = timed_of(record, rates) if family is not None else None
        if timed is not None and timed.measured:
            found.setdefault(str(family), []).append(timed)
    return dict(sorted(found.items()))


def _of_family(timed: Sequence[Timed]) -> dict[str, Any]:
    names = sorted({name for each in timed for name in each.measured})
    enough = [name for name in names if sum(name in each.measured for each in timed) >= LEAST]
    if not enough:
        return {"backends": {}}
    scales = fit_scales(timed, enough)
    return _solved(_family(timed, scales, enough), scales)


def _family(timed: Sequence[Timed], scales: Scales, backends: Sequence[str]) -> dict[str, Any]:
    """Return a family without weights."""
    return {
        "amplitude": scales.amplitude,
        "noise": scales.noise,
        "floors_us": [_rounded(each.features.floor_us) for each in timed],
        "features": {
            name: {"scale": scale, "values": [_rounded(each.features.values[name]) for each in timed]}
            for name, scale in zip(scales.names, scales.scales.tolist(), strict=True)
        },
        "backends": {
            name: {key: [_of(each.measured.get(name), key) for each in timed] for key in MEASURED} for name in backends
        },
    }


def fit_scales(timed: Sequence[Timed], backends: Sequence[str]) -> Scales:
    """Return the most likely scales of the features."""
    every = sorted(timed[0].features.values)
    table = np.array([[each.features.values[name] for name in every] for each in timed])
    spread = table.std(0)
    names = [name for name, deviation in zip(every, spread, strict=True) if deviation > 1e-6]
    spread = spread[spread > 1e-6]
    count = len(names)
    sets: list[tuple[Array, Array]] = []
    for backend in backends:
        mine = [each for each in timed if backend in each.measured]
        x = np.array([[each.features.values[name] for name in names] for each in mine]) / spread
        y = [math.log(each.measured[backend]["times_us"] / each.features.floor_us) for each in mine]
        sets.append((x, np.array(y)))

    def unlikeliness(theta: Array) -> tuple[float, Array]:
        scales, amplitude, noise = np.exp(theta[:count]), math.exp(theta[count]), math.exp(theta[count + 1])
        total, slope = 0.0, np.zeros(count + 2)
        for x, y in sets:
            distances = np.sqrt(_squares(x * scales, x * scales) + 1e-12)  # not 0: the slope divides by it
            kernel = amplitude * np.exp(-distances)
            inverse, logarithm = _inverse(kernel + _LEVEL + noise * np.eye(len(y)))
            weights = inverse @ y
            total += 0.5 * float(y @ weights) + 0.5 * logarithm
            half = 0.5 * (inverse - np.outer(weights, weights))
            # The kernel's slope by the square of a scale is -kernel / (2 distance) times the squared difference.
            inner = half * kernel / (-2 * distances)
            np.fill_diagonal(inner, 0.0)
            squares = 2 * (inner.sum(1) @ x**2 - (x * (inner @ x)).sum(0))
            slope[:count] += squares * 2 * scales**2
            slope[count] += (half * kernel).sum()
            slope[count + 1] += noise * np.trace(half)
        away = (theta[:count] - _PRIOR) / _PRIOR_WIDTH
        louder = (theta[count + 1] - math.log(_NOISE)) / _NOISE_WIDTH
        slope[:count] += away / _PRIOR_WIDTH
        slope[count + 1] += louder / _NOISE_WIDTH
        return total + 0.5 * float(away @ away) + 0.5 * louder**2, slope

    start = np.concatenate([np.full(count, _START), [math.log(_AMPLITUDE), math.log(_NOISE)]])
    theta = minimize(unlikeliness, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS}).x
    scales = np.array([_rounded(each) for each in np.exp(theta[:count]) / spread])
    return Scales(names, scales, _rounded(math.exp(theta[count])), _rounded(math.exp(theta[count + 1])))


def _solved(family: Mapping[str, Any], scales: Scales) -> dict[str, Any]:
    """Return a family with the weights of its backends' times; of workloads without a time the weight is 0."""
    floors = np.array(family["floors_us"])
    values = np.array([each["values"] for each in family["features"].values()])
    places = values.reshape(len(scales.names), len(floors)).T * scales.scales  # no feature may differ
    backends = {}
    for name, known in family["backends"].items():
        here = [index for index, time_us in enumerate(known["times_us"]) if time_us is not None]
        times = np.array([known["times_us"][index] for index in here])
        solved = scales.weights(places[here], np.log(times / floors[here]))
        weights = np.zeros(len(floors))
        weights[here] = solved
        level = _rounded(_LEVEL * float(solved.sum()), 6)
        backends[name] = {"level": level, "weights": [_rounded(weight) for weight in weights.tolist()], **known}
    return {**family, "backends": backends}


def _margin(records: Sequence[Record], families: Mapping[str, Any], rates: Rates, done: Done) -> float:
    """Return the factor within which 95 % of the ratios of the two first backends lie, where their kind is left out."""
    errors: list[float] = []
    for name, timed in _by_family(records, rates).items():
        family = families.get(name)
        if family is None:
            continue
        for each, predicted in _left_out(timed, list(family["backends"]), done):
            if len(predicted) > 1:
                first, second = sorted(predicted, key=predicted.__getitem__)[:2]
                actual = each.measured[second]["times_us"] / each.measured[first]["times_us"]
                errors.append(abs(math.log(actual * predicted[first] / predicted[second])))
    if not errors:
        text = "the survey has two backends on too few kinds of heads and sizes: nothing says how far to trust it"
        raise MeasurementError(text, hint="time more workloads")
    return math.exp(float(np.quantile(errors, 0.95)))


def _left_out(timed: Sequence[Timed], backends: Sequence[str], done: Done) -> list[tuple[Timed, dict[str, float]]]:
    """Return each workload with the times that those of other heads and sizes predict, left out in ten parts."""
    groups = sorted({each.group for each in timed})
    random.Random(0).shuffle(groups)
    found = []
    for fold in range(min(_FOLDS, len(groups))):
        out = set(groups[fold::_FOLDS])
        test = [each for each in timed if each.group in out]
        known = [each for each in timed if each.group not in out]
        if len(known) < LEAST:
            continue
        scales = fit_scales(known, backends)
        done()
        predicted: list[dict[str, float]] = [{} for _ in test]
        for backend in backends:
            train = [each for each in known if backend in each.measured]
            if len(train) < LEAST:
                continue
            x = scales.places(train)
            y = np.log([each.measured[backend]["times_us"] / each.features.floor_us for each in train])
            weights = scales.weights(x, np.asarray(y))
            here = (scales.covariance(scales.places(test), x) + _LEVEL) @ weights
            for each, value, into in zip(test, here, predicted, strict=True):
                if backend in each.measured:
                    into[backend] = each.features.floor_us * math.exp(value)
        found += [*zip(test, predicted, strict=True)]
    return found


def _squares(one: Array, other: Array) -> Array:
    """Return the squared distance of each pair."""
    sums = (one**2).sum(1)[:, None] + (other**2).sum(1)[None, :] - 2 * one @ other.T
    return np.asarray(np.maximum(sums, 0.0))  # rounding may leave less than 0


def _inverse(matrix: Array) -> tuple[Array, float]:
    """Return the inverse of a positive definite matrix, and the logarithm of its determinant."""
    factor = np.linalg.cholesky(matrix)
    return np.asarray(np.linalg.inv(matrix)), 2 * float(np.log(np.diag(factor)).sum())


def _of(measured: Mapping[str, Any] | None, key: str) -> Any:
    """Return a measured value in few digits; None where there is none."""
    value = None if measured is None else measured[key]
    return None if value is None else _rounded(value)


def _rounded(value: float, digits: int = _DIGITS) -> float:
    """Return a number in so many significant digits."""
    found = float(f"{value:.{digits}g}")
    return int(found) if found.is_integer() and abs(found) < 1e15 else found
