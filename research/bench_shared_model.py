"""One model per kernel for all layers: how well does it say the times of layers that it never saw?

Four forms are compared, all on the features of ``attn_select.times.terms`` with rates that all layers share: the curve
alone; the curve with deviations interpolated (as within a layer, with the layer's own axes beside the batch's); the
curve with deviations by boosted trees; and trees on the roofline, without a curve.

    python research/bench_shared_model.py tables h200     # errors on 50 layers of the tables, 10 and 40 others known
    python research/bench_shared_model.py packaged        # regret on each packaged kind of layer, the others known

It needs scikit-learn, and for the tables aiconfigurator-core with pyarrow.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.spatial.distance import cdist
from sklearn.ensemble import HistGradientBoostingRegressor

from attn_select import AttentionConfig
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.terms import LATENT_SCHEDULES, PREFILL_SCHEDULES, PhaseWork, Schedule, phase_work
from attn_select_measure.fitting.points import farthest_first
from attn_select_measure.measured_lines import measured_files, measured_lines

Row = tuple[AttentionConfig, BatchShape, float]
Floats = NDArray[np.float64]
H200 = lookup("h200")
FORMS = ("curve", "curve, interpolated", "curve, trees", "roofline, trees")
_DECODES: tuple[Schedule, ...] = (*LATENT_SCHEDULES, ("rounded", 2))


class Shared:
    """One kernel's model of one phase, fitted to rows of several layers."""

    def __init__(self, rows: Sequence[Row], decode: bool, l2_sizes: Sequence[float]) -> None:
        self.decode, self.works = decode, dict[AttentionConfig, PhaseWork]()
        us, best = np.array([row[2] for row in rows]), math.inf
        for schedule in (None, *(_DECODES if decode else PREFILL_SCHEDULES)):
            for l2_bytes in l2_sizes:
                features = self.features(rows, l2_bytes, schedule)
                greatest = np.maximum(features.max(axis=0), 1e-300)
                for power in (1.0, 1.5, 2.0, 3.0):
                    scaled = (features / greatest) ** power
                    shares, _ = nnls(scaled * (us.mean() / us)[:, None] ** power, np.ones(len(us)))
                    left = np.log(us / np.maximum((scaled @ shares) ** (1 / power) * us.mean(), 1e-9))
                    error = np.abs(left - np.median(left)).mean()
                    if error < best * (1 if best is math.inf or schedule == self.schedule else 0.97):
                        best, self.schedule, self.l2_bytes, self.power = error, schedule, l2_bytes, power
                        self.rates = greatest, shares, us.mean() * math.exp(np.median(left))
        self.rows, self.left = rows, np.log(us / self.curve(rows))

    def features(self, rows: Sequence[Row], l2_bytes: float, schedule: Schedule | None) -> Floats:
        for config, _, _ in rows:
            self.works.setdefault(config, phase_work(config, self.decode, H200.sm_count or 1))
        return np.array([self.works[config].features(batch.groups, l2_bytes, schedule) for config, batch, _ in rows])

    def curve(self, rows: Sequence[Row]) -> Floats:
        greatest, shares, scale = self.rates
        features = self.features(rows, self.l2_bytes, self.schedule)
        return np.asarray(np.maximum((features / greatest) ** self.power @ shares, 1e-300) ** (1 / self.power) * scale)

    def places(self, rows: Sequence[Row]) -> Floats:
        """Return where rows lie: by batch, and by heads, sizes, bytes, window, sinks, cap and drafts of the layer."""
        found = []
        for config, batch, _ in rows:
            logs = (config.num_heads / config.num_kv_heads, config.num_kv_heads, config.head_size)
            drafts = math.log2(1 + config.num_speculative_tokens)
            flags = config.cache_dtype.startswith("fp8"), bool(config.sliding_window), config.sinks
            own = (*map(math.log2, logs), drafts, *map(float, flags), float(config.logits_soft_cap is not None))
            found.append((*self.works[config].coordinates(batch.groups, 1.0), *own))
        return np.array(found)

    def inputs(self, rows: Sequence[Row]) -> Floats:
        features = self.features(rows, self.l2_bytes, self.schedule)
        return np.hstack([np.log(features + 1e-3), self.places(rows)])

    def roofline(self, rows: Sequence[Row]) -> Floats:
        features = self.features(rows, 0.0, None)
        assert H200.bandwidth_gbps is not None
        assert H200.bf16_tflops is not None
        least = np.maximum(features[:, 1] / (H200.bandwidth_gbps * 1e3), features[:, 2] / (H200.bf16_tflops * 1e6))
        return np.asarray(np.log(least + 3))

    def predict(self, form: str, rows: Sequence[Row]) -> Floats:
        curve = self.curve(rows)
        if form == "curve":
            return curve
        if form == "curve, interpolated":
            known = self.places(self.rows)
            apart = cdist(known, known)
            most = 2 * apart.max() + 1
            weights = np.linalg.solve(most - apart + 0.1 * np.eye(len(known)), self.left)
            return np.asarray(curve * np.exp((most - cdist(self.places(rows), known)) @ weights))
        trees = HistGradientBoostingRegressor(
            max_iter=400, learning_rate=0.05, min_samples_leaf=5, l2_regularization=1.0, random_state=0
        )
        if form == "curve, trees":
            return np.asarray(curve * np.exp(trees.fit(self.inputs(self.rows), self.left).predict(self.inputs(rows))))
        us = np.log([row[2] for row in self.rows])
        trees.fit(self.inputs(self.rows), us - self.roofline(self.rows))
        return np.asarray(np.exp(self.roofline(rows) + trees.predict(self.inputs(rows))))


def geomean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def tables(gpu: str) -> None:
    """Print the errors on layers of the tables that were not fitted, 25 batches of each."""
    from bench_times_model import LEAST, read

    every = read(lookup(gpu))
    for kernel in sorted({kernel for times in every.values() for kernel in times}):
        for phase in ("decode", "prefill"):
            layers = sorted((k for k in every if k[1] == phase and len(every[k].get(kernel, ())) >= LEAST), key=str)
            if len(layers) < 110:
                continue
            random.Random(1).shuffle(layers)
            draw = random.Random(2)
            asked: list[Row] = []
            for layer, _ in layers[60:110]:
                times = every[layer, phase][kernel]
                asked += [(layer.config, b, times[b]) for b in draw.sample(sorted(times, key=str), 25)]
            us = np.array([row[2] for row in asked])
            for known in (10, 40):
                rows: list[Row] = []
                for layer, _ in layers[:known]:
                    times = every[layer, phase][kernel]
                    rows += [(layer.config, b, times[b]) for b in farthest_first(list(times), 25)]
                model = Shared(rows, phase == "decode", (0.0, 32e6, 64e6))
                for form in FORMS:
                    median, ninth = np.quantile(np.abs(model.predict(form, asked) / us - 1), (0.5, 0.9))
                    print(f"{kernel:38} {phase:8} {known} layers known, {form:20} median {median:.1%}  p90 {ninth:.1%}")


def packaged() -> None:
    """Print the regret of choosing by predictions on each kind of layer, whose times are left out whole, beside that of
    the kernel which is best on the other kinds."""
    known: dict[tuple[bool, str], dict[str, dict[AttentionConfig, dict[str, float]]]] = {}
    for stored in measured_lines(measured_files()[0]).measurements:
        one = stored.measurement
        config = AttentionConfig(**one.config)
        if len(one.kernel) == 1 and one.backend not in ("FLEX_ATTENTION", "PAGED_ATTENTION"):
            ((phase, kernel),) = one.kernel.items()
            kernels = known.setdefault((config.mla, phase), defaultdict(lambda: defaultdict(dict)))
            kernels[f"{one.backend} {kernel}"][config][one.batch] = one.time_us
    for (mla, phase), kernels in known.items():
        regrets: dict[str, list[float]] = defaultdict(list)
        for left_out in {config: None for layers in kernels.values() for config in layers}:
            able = [k for k, layers in kernels.items() if left_out in layers and len(layers) > 1]
            if len(able) < 2:
                continue
            times = {k: kernels[k][left_out] for k in able}
            batches = sorted(set.intersection(*(set(each) for each in times.values())))
            asked: list[Row] = [(left_out, parse_batch_shape(batch), 1.0) for batch in batches]
            predicted: dict[str, dict[str, Any]] = defaultdict(dict)
            for kernel in able:
                others = {config: each for config, each in kernels[kernel].items() if config != left_out}
                rows = [(c, parse_batch_shape(b), us) for c, each in others.items() for b, us in each.items()]
                model = Shared(rows, phase == "decode", (0.0,))
                model.features(asked, 0.0, None)
                for form in FORMS:
                    predicted[form][kernel] = model.predict(form, asked)
            lost: dict[str, list[float]] = defaultdict(list)
            for config in {c: None for k in able for c in kernels[k] if c != left_out}:
                here = [k for k in able if config in kernels[k]]
                for batch in set.intersection(*(set(kernels[k][config]) for k in here)):
                    least = min(kernels[k][config][batch] for k in here)
                    for k in here:
                        lost[k].append(kernels[k][config][batch] / least)
            fixed = min(lost, key=lambda k: geomean(lost[k]))
            for at, batch in enumerate(batches):
                least = min(times[k][batch] for k in able)
                for form in FORMS:
                    chosen = min(able, key=lambda k: predicted[form][k][at])
                    regrets[form].append(times[chosen][batch] / least)
                regrets["best on the others"].append(times[fixed][batch] / least)
        for form, values in regrets.items():
            text = f"{geomean(values):.3f}, worst {max(values):.2f}, of {len(values)}"
            print(f"{'MLA' if mla else 'MHA'} {phase:8} {form:20} {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tables", "packaged"))
    parser.add_argument("gpu", nargs="?", default="h200", help="of the tables (default: h200)")
    arguments = parser.parse_args()
    tables(arguments.gpu) if arguments.what == "tables" else packaged()


if __name__ == "__main__":
    main()
