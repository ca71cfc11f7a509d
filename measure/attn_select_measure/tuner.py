"""Tunes layers phase by phase within a budget of time, with what ``attn-select bench`` measures with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from attn_select.decide.config_text import config_text
from attn_select.decide.selector import select
from attn_select.decide.text import HANG, Line
from attn_select.errors import ConfigError
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.measurement import MEASURED, Measurement
from attn_select.times.roofline import is_decode, roofline_us, step_work
from attn_select.times.store import MeasurementFile, Stored, append_measurements, read_measurements
from attn_select.times.timed_layer import timed_layer
from attn_select.times.timing import TIE
from attn_select.times.workload import Workload, phases_of
from attn_select_cli.output import counted
from attn_select_cli.table import Block, Table
from attn_select_measure.benching import Bench, Candidate, TimedBatch, check_runnable
from attn_select_measure.fitting.keeping import fit_file
from attn_select_measure.fitting.points import farthest_first
from attn_select_measure.measured_lines import measured_files, measured_lines
from attn_select_measure.regions import Region, find_regions, next_batch, order_in
from attn_select_measure.tuned_rules import regions_of, rule_tables, tuned_before
from attn_select_measure.tuning import MIXED, Domain, Span, Tuning

_LONGEST_US = 30_000.0
"""Batches that take longer by the roofline are left out: they would cost the time of many others."""
_MEMORY_SHARE = 0.7
"""Batches that move more than this share of the device's memory are left out."""
_MOST_NEW_TOKENS, _MOST_TOKENS = 1 << 15, 1 << 20
"""New tokens and tokens of all requests of a batch, where neither ranges nor a workload are asked for: what a model's
layers share the memory for. Times of larger batches would say little of a service's batches."""
_BATCH_SECONDS = 2.0
"""Most seconds of timing for one batch."""
_WORSE = 1.005
"""Rules that lose to the present order by more than this factor on held-out batches are not written."""
_COMPARED = 2
"""Batches of a layer's phase whose results are compared with the oracle."""
_FAILURES = 3
"""A backend that fails at this many batches and has no time takes no part any more."""
_DRIFT = math.log1p(TIE)
"""By how much, as a logarithm, a known time may differ from a new one of the same backend and batch: where it differs
more, the device runs otherwise than it did, and the other known times of the batch do not compare with new ones.
Packaged times are those of another device: they count where no backend differs more, in the median over batches."""
_CHECKED = 3
"""Batches with packaged times that are measured here, before packaged times count."""
_BATCH: Span = (1, 256)
_PREFILL_BATCH: Span = (1, 16)
_QUERY_LEN: Span = (64, 16384)
_SEQ_LEN: Span = (128, 131072)
_STATE_SEQ_LEN: Span = (1024, 1024)
"""Of decodes that read a state, whose times do not depend on it."""


@dataclass(slots=True)
class LayerTuning:
    """One phase of one layer kind.

    Attributes:
        kind: the layer kind's name.
        tuning: its measured batches.
        candidates: what is measured.
        known: batches whose times were kept from before, here.
        packaged: microseconds by backend of the batches that this project brings times of, until it is known whether
            they hold here: then they are among the measured ones, or gone.
        to_check: batches of these to measure first.
        num_packaged: batches whose packaged times count.
        unlike: why packaged times are not used on this device; empty where they are, or where there are none.
        measured_here: batches that were measured since.
        measured: when the last of its times was measured, ISO 8601.
        libraries: versions by distribution, by backend.
        kernels: name of the phase's kernel, by backend.
        wrong: backends that take no part, with what was seen: results that differ from the oracle's, or failures.
        failures: by backend how many batches it failed at.
        mixed: batches of prefills and decodes to measure: no rule is made of them, but times choose by them.
    """

    kind: str
    tuning: Tuning
    candidates: list[Candidate]
    weighted: dict[BatchShape, float]
    known: frozenset[BatchShape] = frozenset()
    packaged: dict[BatchShape, dict[str, float]] = field(default_factory=dict)
    to_check: list[BatchShape] = field(default_factory=list)
    num_packaged: int = 0
    unlike: str = ""
    measured_here: int = 0
    measured: str = ""
    libraries: dict[str, dict[str, str]] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    mixed: list[BatchShape] = field(default_factory=list)
    done: bool = False

    @property
    def needs(self) -> BatchShape | None:
        """A batch that is measured in any case."""
        return next(iter(self.to_check), None) or self.tuning.due() or next(iter(self.mixed), None)

    @property
    def compared(self) -> list[BatchShape]:
        """Batches of which two or more backends have a packaged time and one measured here."""
        here = self.tuning.samples
        return [b for b, times in self.packaged.items() if len(times.keys() & here.get(b, {}).keys()) > 1]

    def judge_packaged(self) -> None:
        """Take over the packaged times, if the backends took as long here."""
        ratios: dict[str, list[float]] = {}
        compared = self.compared
        for batch in compared:
            here, times = self.tuning.samples[batch], self.packaged[batch]
            for name in (name for name in times if name in here):
                ratios.setdefault(name, []).append(math.log(here[name] / times[name]))
        apart = {name: median(each) for name, each in ratios.items()}
        worst = max(apart, key=lambda name: abs(apart[name]), default="")
        if len(compared) < _CHECKED:
            self.unlike = f"they could be compared at {counted(len(compared), 'batch', 'batches')} only"
        elif abs(apart[worst]) > _DRIFT:
            batches = counted(len(ratios[worst]), "batch", "batches")
            self.unlike = f"{worst} takes {math.exp(apart[worst]):.2f} times its packaged time here ({batches})"
        else:
            taken = {batch: times for batch, times in self.packaged.items() if batch not in self.tuning.samples}
            for batch, times in taken.items():
                self.tuning.add(batch, times, times)
            self.num_packaged = len(taken)
        self.packaged.clear()

    @property
    def enough(self) -> bool:
        """Whether rules can be made: a model needs some batches, and some judge it, unless there are no more."""
        return bool(self.tuning.fitted) and (self.done or self.tuning.due() is None)


class Tuner:
    """Measures the layers that are added, in turn.

    Args:
        bench: measures.
        file: where times are kept; what it holds of the same layers, kernels and versions is not measured again.
            Packaged times of these count too, once some of their batches were measured here and took as long.
        backends: the ones that take part; none: every valid one.

    Attributes:
        layers: what was added.
        skipped: kinds of layers that cannot be timed alone, with the reason.
        interrupted: whether somebody stopped it.
    """

    def __init__(self, bench: Bench, file: Path, backends: Sequence[str] = ()) -> None:
        self.bench, self.file, self._backends = bench, file, backends
        self._rated = bench.rates.of(bench.device)
        self.layers: list[LayerTuning] = []
        self.skipped: dict[str, str] = {}
        self.interrupted = False

    def add(
        self,
        kind: str,
        config: LayerConfig,
        phase: Phase,
        spans: Mapping[str, Span | None],
        workload: Workload | None,
    ) -> None:
        """Add one phase of a layer; one with equal times that is there already is not added again.

        ``spans`` are the ranges of ``batch``, ``query_len`` and ``seq_len``, None for the default. A workload that has
        requests of this phase replaces the defaults by what its requests span; with none, the phase is left out.

        Raises:
            ConfigError: the layer cannot be timed, or no batch lies in the ranges.
        """
        weighted: dict[BatchShape, float] = {}
        usual: dict[str, Span] = {"batch": _BATCH, "query_len": _QUERY_LEN, "seq_len": _SEQ_LEN}
        if phase == "prefill":
            usual["batch"] = _PREFILL_BATCH
        if workload is not None:
            weighted = {shape.batch: shape.weight for shape in workload.of_phase(phase, config)}
            spanned = _spans(workload, config, phase)
            if spanned is None:
                return
            usual = spanned
        layer = timed_layer(config)
        if any(each.tuning.phase == phase and timed_layer(each.tuning.config) == layer for each in self.layers):
            return
        found = {name: spans.get(name) or span for name, span in usual.items()}
        if phase == "decode":
            longest = config.max_decode_query_len
            found["query_len"] = (longest, longest)
        seq_len = found["seq_len"] if config.has_cache else None
        uneven = phase == "decode"
        if isinstance(config, StateConfig):
            seq_len, uneven = _STATE_SEQ_LEN if phase == "decode" else None, False
        fits = self._fits(config, usual=workload is None and not any(spans.values()))
        domain = Domain(found["batch"], found["query_len"], seq_len, fits, uneven=uneven)
        cells = domain.cells(1)
        if not cells:
            text = ", ".join(f"{name} {low} to {high}" for name, (low, high) in domain.axes.items())
            raise ConfigError(
                f"{phase}: no batch with {text} can be timed here",
                fields=[*domain.axes],
                hint="query_len is at most seq_len; by an estimate a batch takes at most "
                f"{_LONGEST_US / 1e3:g} ms and moves at most {_MEMORY_SHARE:.0%} of the device's memory",
            )
        check_runnable(config, cells[0])
        candidates = [c for c in self.bench.candidates(config, cells[0], self._backends) if c.failure is None]
        ranked = select(config, self.bench.device, self.bench.rules, environment=self.bench.environment)
        ranks = {each.backend: each.phases[phase].rank for each in ranked.candidates if phase in each.phases}
        candidates.sort(key=lambda candidate: ranks.get(candidate.name) or len(ranks) + 1)
        tuning = Tuning(config, phase, self.bench.device, domain, [candidate.name for candidate in candidates])
        added = LayerTuning(kind, tuning, candidates, weighted)
        plans = {each.backend: each.phases[phase].plan for each in ranked.candidates if phase in each.phases}
        added.kernels = {name: (plan and plan.kernel_name) or "unnamed" for name, plan in plans.items()}
        added.libraries = {name: self.bench.libraries(name, config) for name in tuning.backends}
        if phase == "prefill" and config.sort == "attention":  # others compute the phases one behind the other
            added.mixed = self._mixed(added, spans.get("batch") or _BATCH, workload)
        self._read(added)
        self.layers.append(added)

    @staticmethod
    def _mixed(layer: LayerTuning, decodes: Span, workload: Workload | None) -> list[BatchShape]:
        config = layer.tuning.config
        if workload is None:
            return layer.tuning.domain.mixed(decodes, config.max_decode_query_len)
        return [shape.batch for shape in workload.shapes if len(phases_of(shape.batch, config)) > 1]

    def _fits(self, config: LayerConfig, usual: bool) -> Callable[[BatchShape], bool]:
        most_bytes = _MEMORY_SHARE * (self.bench.device.memory_gib or 8) * 2**30

        def fits(batch: BatchShape) -> bool:
            if usual and (batch.num_tokens > _MOST_NEW_TOKENS or batch.num_kv_tokens > _MOST_TOKENS):
                return False
            return (roofline_us(config, batch, self._rated) or 0.0) <= _LONGEST_US and (
                step_work(config, batch).bytes <= most_bytes
            )

        return fits

    def _read(self, layer: LayerTuning) -> None:
        """Take over what the file holds of this layer; choose what says whether the packaged times hold here."""
        mixed: dict[str, int] = {}
        tuning = layer.tuning
        own = [MeasurementFile("user", self.file)] if self.file.is_file() else []
        for one in self._known(layer, read_measurements(own, self.bench.gpu)):
            batch = parse_batch_shape(one.batch)
            mixed[one.backend] = mixed.get(one.backend, 0) + (len(phases_of(batch, tuning.config)) > 1)
            if tuning.domain.holds(batch) or batch in tuning.held_out:
                tuning.add(batch, {one.backend: one.time_us}, [one.backend])
                layer.measured = max(layer.measured, one.date)
        if all(mixed.get(name, 0) >= MIXED for name in tuning.backends):
            layer.mixed.clear()
        layer.known = frozenset(tuning.samples)
        for path in measured_files():
            for one in self._known(layer, measured_lines(path, self.bench.gpu)):
                batch = parse_batch_shape(one.batch)
                if tuning.domain.holds(batch):
                    times = layer.packaged.setdefault(batch, {})
                    times[one.backend] = min(one.time_us, times.get(one.backend, math.inf))
        most = max(map(len, layer.packaged.values()), default=0)
        comparable = [batch for batch, times in layer.packaged.items() if len(times) == most > 1]
        if len(layer.compared) < _CHECKED <= len(comparable):
            layer.to_check = [batch for batch in farthest_first(comparable, _CHECKED) if batch not in tuning.samples]
        if layer.packaged and not layer.to_check:
            layer.judge_packaged()
        tuning.hold_out_known()

    def _known(self, layer: LayerTuning, stored: Stored) -> Iterator[Measurement]:
        """Yield what was measured of this layer with these versions and kernels."""
        fields = timed_layer(layer.tuning.config).to_dict()
        for row in stored.measurements:
            one = row.measurement
            if (
                one.source == MEASURED
                and one.config == fields
                and one.backend in layer.tuning.backends
                and one.libraries == layer.libraries[one.backend]
                and one.kernel.get(layer.tuning.phase) == layer.kernels.get(one.backend)
            ):
                yield one

    def run(self, seconds: float, say: Callable[[str], None]) -> None:
        """Measure until the time is over, no batch would change a rule, or it is interrupted.

        First comes what every layer and phase needs, one after the other, so that the layers that are reached get
        rules; then, in turn, what each is least sure of.
        """
        deadline = time.monotonic() + seconds
        active = [layer for layer in self.layers if len(layer.tuning.backends) > 1]
        try:
            while active:
                needing = next((layer for layer in active if layer.needs is not None), None)
                for layer in [*active] if needing is None else [needing]:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return
                    batch = layer.needs or next_batch(layer.tuning)
                    if batch is None:
                        layer.done = True
                        active.remove(layer)
                        continue
                    say(f"{layer.kind}, {layer.tuning.phase}: {batch} ({left:.0f} s left)")
                    if batch in layer.mixed:
                        self._measure_mixed(layer, batch)
                    else:
                        self._measure(layer, batch)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            if self.file.is_file():
                fit_file(self.file)

    def _measure(self, layer: LayerTuning, batch: BatchShape) -> None:
        """Measure the backends that were not tried on a batch, beside the fastest of those that were; all of them where
        all were tried, or none."""
        tuning = layer.tuning
        known = tuning.samples.get(batch, {}) if tuning.missing(batch) else {}
        beside = min(known, key=known.__getitem__, default=None)
        asked = {*(tuning.missing(batch) or tuning.backends), *([beside] if beside else [])}
        candidates = [each for each in layer.candidates if each.name in asked and each.name not in layer.wrong]
        found = self._timed(layer, batch, candidates)
        times = {each.backend: each.time_us for each in found.timed if each.failure is None}
        self._note_failures(layer, {each.backend: each.failure for each in found.timed if each.failure is not None})
        if beside is not None and abs(math.log(times.get(beside, math.inf) / known[beside])) > _DRIFT:
            tuning.forget(batch)  # all are measured side by side where this batch is asked for again
        else:
            tuning.add(batch, times, asked)
        if batch in layer.to_check:
            layer.to_check.remove(batch)
            if not layer.to_check:
                layer.judge_packaged()
        for name in layer.wrong:
            tuning.leave_out(name)
        tuning.hold_out_known()

    def _measure_mixed(self, layer: LayerTuning, batch: BatchShape) -> None:
        """Measure the backends that serve both phases on a batch of prefills and decodes; the file keeps the times."""
        layer.mixed.remove(batch)
        able = self.bench.candidates(layer.tuning.config, batch, self._backends)
        candidates = [each for each in able if each.failure is None and each.name not in layer.wrong]
        if candidates:
            self._timed(layer, batch, candidates)

    def _timed(self, layer: LayerTuning, batch: BatchShape, candidates: Sequence[Candidate]) -> TimedBatch:
        """Measure, and keep the times in the file.

        Raises:
            KeyboardInterrupt: it was interrupted; what was measured so far is kept.
        """
        config, compare = layer.tuning.config, layer.measured_here < _COMPARED
        found = self.bench.measure(config, batch, candidates, _BATCH_SECONDS, compare)
        for timed in found.timed:
            if timed.failure is None and not timed.exact:
                layer.wrong[timed.backend] = f"error {timed.error:.1e} at {batch}, above its bound {timed.bound:.1e}"
        right = [each for each in self.bench.measurements(config, found) if each.backend not in layer.wrong]
        append_measurements(self.file, right)
        if not found.complete:
            raise KeyboardInterrupt
        layer.measured = max([layer.measured, *(each.date for each in right)])
        layer.measured_here += 1
        return found

    @staticmethod
    def _note_failures(layer: LayerTuning, failed: Mapping[str, str]) -> None:
        """Let a backend that always fails take no part any more."""
        for name, why in failed.items():
            layer.failures[name] = layer.failures.get(name, 0) + 1
            known = any(name in times for times in layer.tuning.samples.values())
            if layer.failures[name] == _FAILURES and not known:
                layer.wrong[name] = f"it failed at each of {_FAILURES} batches: {why}"


def _spans(workload: Workload, config: LayerConfig, phase: Phase) -> dict[str, Span] | None:
    """Return what a workload's requests of a phase span; None where it has none."""
    parts = []
    for shape in workload.shapes:
        groups = [group for group in shape.batch.groups if is_decode(config, group.query_len) is (phase == "decode")]
        if groups:
            parts.append(BatchShape(tuple(groups)))
    groups = [group for part in parts for group in part.groups]
    if not groups:
        return None
    values = {
        "batch": [part.num_requests for part in parts],
        "query_len": [group.query_len for group in groups],
        "seq_len": [group.seq_len for group in groups],
    }
    return {name: (min(each), max(each)) for name, each in values.items()}


@dataclass(slots=True)
class TunedLayer:
    """What one phase of a layer came to.

    Attributes:
        layer: what was measured.
        regions: first the one without bounds; none where too little was measured.
        tables: the rules; an earlier tuning's where nothing speaks against them.
        replaced: the rules of an earlier tuning.
        regrets: over the held-out batches, the time of the first backend of the regions over the best time.
        any_batch: the same for the order of the first region alone, which counts where no workload is named.
        before: the same for the order of the rules that are in force without a workload.
        kept: why any batch outside the other regions keeps the order in force, so that it gets no rule; or None.
        refused: why there are no rules, or None.
    """

    layer: LayerTuning
    regions: list[Region]
    tables: list[Mapping[str, Any]]
    replaced: list[Mapping[str, Any]]
    regrets: list[float]
    any_batch: list[float]
    before: list[float]
    kept: str | None
    refused: str | None

    @property
    def unfinished(self) -> bool:
        """Whether too little was measured, or nothing was made of it, though there are backends to choose from."""
        return len(self.layer.tuning.backends) > 1 and not self.regions


def outcomes(tuner: Tuner, rules: Sequence[Mapping[str, Any]]) -> Iterator[TunedLayer]:
    """Yield what every layer and phase came to, and which of a file's ``rules`` that replaces.

    An interrupt leaves those without rules whose turn has not come.
    """
    stopped = False
    for layer in tuner.layers:
        one = None
        if not stopped:
            try:
                one = _outcome_of(layer, rules, tuner.bench.device)
            except KeyboardInterrupt:
                stopped = tuner.interrupted = True
        yield one or TunedLayer(layer, [], [], [], [], [], [], None, "interrupted before they were made")


def _outcome_of(layer: LayerTuning, rules: Sequence[Mapping[str, Any]], device: Device) -> TunedLayer:
    tuning = layer.tuning
    replaced = tuned_before(rules, tuning.config, device, tuning.phase)
    present = regions_of(replaced, tuning.config, device, layer.libraries)
    held = [(b, tuning.samples[b]) for b in tuning.held_out if not tuning.missing(b) and tuning.samples[b]]
    before = [_regret(tuning.backends, times) for _, times in held]
    if present and present[0].bounds:
        present = [Region([*tuning.backends]), *present]
    regions: list[Region] = []
    any_batch: list[float] = []
    kept = None
    if len(tuning.backends) > 1 and layer.enough:
        regions = find_regions(tuning, layer.weighted or None, present)
        any_batch = [_regret(regions[0].order, times) for _, times in held] if regions else []
        kept = _why_kept(any_batch, before) if regions and regions[0].order != tuning.backends else None
        if kept is not None:
            regions = find_regions(tuning, layer.weighted or None, present, tuning.backends)
    regrets = [_regret(order_in(regions, batch), times) for batch, times in held] if regions else []
    refused = None
    if len(tuning.backends) < 2:
        refused = f"only {tuning.backends[0]} is valid" if tuning.backends else "no backend is valid"
    elif not regions:
        refused = "too few batches were measured; give more --seconds"
    elif regrets and (mean := geometric_mean(regrets)) > _WORSE * (mean_before := geometric_mean(before)):
        refused = f"the present order does better on held-out batches, {mean_before:.3f} against {mean:.3f}"
    elif kept and len(regions) == 1:
        refused = kept
    if refused:
        tables: list[Mapping[str, Any]] = []
    elif regions == present:
        tables = replaced
    else:
        made = (tuning.config, device, tuning.phase, regions, layer.libraries, layer.measured)
        tables = [*rule_tables(*made, any_batch=kept is None)]
    return TunedLayer(layer, regions, tables, replaced, regrets, any_batch, before, kept, refused)


def _why_kept(regrets: Sequence[float], before: Sequence[float]) -> str | None:
    """Return why an order for any batch is not to replace the one in force; None where it loses to it in nothing.

    Args:
        regrets: of the new order on the held-out batches.
        before: of the order in force on the same ones.
    """
    if not regrets:
        return "no held-out batch was measured, and nothing else judges an order for any batch"
    mean, mean_before = geometric_mean(regrets), geometric_mean(before)
    if mean <= mean_before and max(regrets) <= max(before):
        return None
    return (
        f"for any batch the present order stays: held-out regret {mean_before:.3f} (worst {max(before):.2f}); "
        f"the order by mean times has {mean:.3f} (worst {max(regrets):.2f})"
    )


def _regret(order: Sequence[str], times: Mapping[str, float]) -> float:
    return next(times[name] for name in (*order, *times) if name in times) / min(times.values())


def outcome_lines(outcome: Sequence[TunedLayer], tuner: Tuner) -> list[Block]:
    """Return the tables and the figures that judge them."""
    lines: list[Block] = []
    for kind, reason in tuner.skipped.items():
        lines += [[(f"{kind}  ", "title")], [("  not timed: ", "warning"), HANG, (reason, "")], []]
    for one in outcome:
        layer, tuning = one.layer, one.layer.tuning
        lines += [[(f"{layer.kind}, {tuning.phase}  ", "title"), HANG, (config_text(tuning.config), "")]]
        measured = counted(len(tuning.samples), "batch", "batches")
        held, before = len(one.before), sum(batch in layer.known for batch in tuning.held_out)
        judges = f"{held} of them held out" + (f", {before} of these known before" if before else "")
        packaged = f", {layer.num_packaged} packaged" if layer.num_packaged else ""
        told = f"{measured} measured, {len(layer.known)} of them before{packaged}; {judges}"
        lines.append([("  ", ""), HANG, (told, "dim")])
        if layer.unlike:
            lines.append([("  packaged times do not count: ", "warning"), HANG, (layer.unlike, "warning")])
        for name, text in layer.wrong.items():
            lines.append([(f"  {name} takes no part: ", "rejected"), HANG, (text, "rejected")])
        if one.refused is not None:
            lines += [[("  no rules: ", "warning"), HANG, (one.refused, "warning")], []]
            continue
        rows = [
            [
                "  " + (" and ".join(f"{name} {value}" for name, value in region.conditions().items()) or "any batch"),
                ", ".join(region.order),
                table["because"].partition(": ")[2] or "-",
            ]
            for region, table in zip(one.regions[-len(one.tables) :], one.tables, strict=True)
        ]
        lines.append(Table(["  batches", "order", "measured"], rows))
        if one.kept is not None:
            lines.append([("  ", ""), HANG, (one.kept, "")])
        if held:
            lines.append(_regret_line("with a workload", one.regrets))
            if one.kept is None:
                lines.append(_regret_line("without a workload", one.any_batch))
            lines.append(_regret_line("present order", one.before))
        lines.append([])
    return [*lines, [("Times kept in ", "dim"), HANG, (str(tuner.file), "")], []]


def _regret_line(name: str, regrets: Sequence[float]) -> Line:
    mean, most = geometric_mean(regrets), max(regrets)
    return [(f"  held-out regret, {name:<18}  ", ""), (f"{mean:.3f} (worst {most:.2f})", "title")]


def outcome_dicts(outcome: Sequence[TunedLayer]) -> list[dict[str, Any]]:
    """Return the outcome as plain data; ``docs/json.md`` documents it."""
    return [
        {
            "kind": one.layer.kind,
            "phase": one.layer.tuning.phase,
            "config": one.layer.tuning.config.model_dump(),
            "backends": list(one.layer.tuning.backends),
            "batches": len(one.layer.tuning.samples),
            "reused": len(one.layer.known),
            "packaged": one.layer.num_packaged,
            "finished": one.layer.done,
            "wrong": one.layer.wrong,
            "refused": one.refused,
            "any_batch_kept": one.kept,
            "rules": one.tables,
            "held_out": {
                "batches": len(one.before),
                "regret": one.regrets,
                "regret_any_batch": one.any_batch,
                "regret_before": one.before,
            },
        }
        for one in outcome
    ]
