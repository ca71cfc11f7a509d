"""What a report shows of measured times: one group of charts for each layer and GPU, and the regret per workload."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import geometric_mean

from attn_select.decide.config_text import config_text
from attn_select.decide.selector import environment_for, select
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device, find_gpu
from attn_select.machine.environment import Environment
from attn_select.rules.layers import RuleSet
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.measurement import MEASURED, Measurement
from attn_select.times.roofline import roofline_us
from attn_select.times.store import Stored, measurement_files, read_measurements
from attn_select.times.timed_layer import TimedLayer, layer_from_dict, timed_layer
from attn_select.times.workload import PROFILES, parse_workload
from attn_select_measure.charts import PAGE, Bar, Line, bars, in_page, lines
from attn_select_measure.measured_lines import every_measurement

_LEAST_CONTEXTS = 3
_MOST_COUNTS = 3
"""Charts of decode per layer, each with another number of requests."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its SVG, and the figures behind it as a table."""

    title: str
    svg: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class ChartGroup:
    """The charts of one layer on one GPU."""

    title: str
    gpu: str
    text: str
    provenance: str
    charts: Sequence[Chart]


@dataclass(frozen=True, slots=True)
class RegretGroup:
    """The regret of one layer on one GPU."""

    title: str
    gpu: str
    chart: Chart


@dataclass(frozen=True)
class TimedOn:
    """Everything measured of one layer on one GPU.

    Attributes:
        layer: what was timed.
        gpu: as the measurements name it.
        times: the newest measurement of each backend and batch.
        over_ranks: the same for ranks that share the layer's heads and each request's cache, by their number.
        title: what readers know the layer by.
    """

    layer: TimedLayer
    gpu: str
    times: Mapping[tuple[str, BatchShape], Measurement]
    over_ranks: Mapping[tuple[str, BatchShape], Mapping[int, Measurement]]
    title: str

    @cached_property
    def config(self) -> AttentionConfig:
        """The layer."""
        config = self.layer.config
        assert isinstance(config, AttentionConfig)
        return config

    @cached_property
    def device(self) -> Device | None:
        """The GPU; None where the data file does not know it."""
        return find_gpu(self.gpu)

    @cached_property
    def backends(self) -> list[str]:
        """The backends that were timed, by name."""
        return sorted({backend for backend, _ in (*self.times, *self.over_ranks)})

    @cached_property
    def batches(self) -> list[BatchShape]:
        """The batches that were timed, in the order of their least time."""
        found = {batch for _, batch in self.times}
        return sorted(found, key=lambda batch: (self.roofline(batch) or 0.0, str(batch)))

    def roofline(self, batch: BatchShape) -> float | None:
        """Return the least time in us of a batch; None where the device's rates are unknown."""
        return roofline_us(self.config, batch, self.device) if self.device is not None else None


def read_times(files: Sequence[str], alone: bool) -> Stored:
    """Return the measurements in the named files, and unless ``alone`` in the files that decisions read too."""
    if alone:
        return read_measurements([file for file in measurement_files(files) if file.kind == "named"])
    return every_measurement(files)


def timed_on(stored: Stored, titles: Mapping[tuple[TimedLayer, str], str] | None) -> list[TimedOn]:
    """Return what was measured by layer and GPU.

    Args:
        titles: the layers and the full names of GPUs to show, with what readers know the layer by; None for all.
    """
    groups: dict[tuple[TimedLayer, str], dict[int, dict[tuple[str, BatchShape], Measurement]]] = {}
    for row in stored.measurements:
        found = row.measurement
        try:
            layer, batch = layer_from_dict(found.config), parse_batch_shape(found.batch)
        except ConfigError:
            continue  # `measurements check` names such lines
        if layer.config.sort == "state":
            continue  # charts are over lengths, which do not count there
        device, ranks = find_gpu(found.gpu), 1
        name = device.name if device else ""
        if titles is None or (layer, name) not in titles:
            ranks, layer = _on_one_rank(layer)
        if found.source != MEASURED or (titles is not None and (layer, name) not in titles):
            continue
        known = groups.setdefault((layer, found.gpu), defaultdict(dict))[ranks]
        before = known.get((found.backend, batch))
        if before is None or before.date <= found.date:
            known[found.backend, batch] = found

    def title(layer: TimedLayer, gpu: str) -> str:
        device = find_gpu(gpu)
        return titles[layer, device.name] if titles is not None and device else config_text(layer.config)

    def over_ranks(
        known: Mapping[int, Mapping[tuple[str, BatchShape], Measurement]],
    ) -> dict[tuple[str, BatchShape], dict[int, Measurement]]:
        several = {key for ranks, times in known.items() if ranks > 1 for key in times}
        return {key: {ranks: known[ranks][key] for ranks in sorted(known) if key in known[ranks]} for key in several}

    return [
        TimedOn(layer, gpu, known.get(1, {}), over_ranks(known), title(layer, gpu))
        for (layer, gpu), known in groups.items()
    ]


def _on_one_rank(layer: TimedLayer) -> tuple[int, TimedLayer]:
    """Return how many ranks share each request's cache, and the layer with the heads of all of them."""
    config = layer.config
    assert isinstance(config, AttentionConfig)
    ranks = config.decode_context_parallel_size
    if ranks == 1:
        return 1, layer
    heads = {"num_heads": config.num_heads * ranks, "decode_context_parallel_size": 1}
    if not config.mla:
        heads["num_kv_heads"] = config.num_kv_heads  # every rank has them all
    return ranks, timed_layer(AttentionConfig(**{**layer.to_dict(), **heads}))


def chart_groups(timed: Iterable[TimedOn], colours: Mapping[str, int]) -> list[ChartGroup]:
    """Return the charts of each layer and GPU; ``colours`` has the index of each backend's colour."""
    groups = []
    for number, one in enumerate(timed):
        if not one.times:  # times of several ranks alone are compared with nothing
            continue
        drawn = [*_decode_charts(one, colours, number), *_prefill_chart(one, colours, number)]
        drawn += [*_roofline_chart(one, colours, number), *_scaling_chart(one, colours, number)]
        dates = sorted({found.date[:10] for found in one.times.values() if found.date})
        text = f"{len(one.times)} times of {len(one.batches)} batches"
        if dates:
            text += f", {dates[0]}" + (f" to {dates[-1]}" if dates[0] != dates[-1] else "")
        groups.append(ChartGroup(one.title, one.gpu, config_text(one.config), f"{text}.", drawn))
    return groups


def _decode_charts(one: TimedOn, colours: Mapping[str, int], number: int) -> list[Chart]:
    contexts: dict[int, list[BatchShape]] = defaultdict(list)
    for batch in one.batches:
        if len(batch.groups) == 1 and batch.groups[0].query_len == 1:
            contexts[batch.num_requests].append(batch)
    counts = sorted(count for count, batches in contexts.items() if len(batches) >= _LEAST_CONTEXTS)
    if len(counts) > _MOST_COUNTS:
        counts = [counts[0], counts[len(counts) // 2], counts[-1]]
    return [
        _over_tokens(
            one,
            contexts[count],
            colours,
            f"Decode, {count} request{'s' if count > 1 else ''}",
            "tokens of context per request",
            f"c{number}-d{count}",
        )
        for count in counts
    ]


def _prefill_chart(one: TimedOn, colours: Mapping[str, int], number: int) -> list[Chart]:
    whole = [b for b in one.batches if b.num_requests == 1 and b.num_tokens == b.max_seq_len > 1]
    if len(whole) < _LEAST_CONTEXTS:
        return []
    return [_over_tokens(one, whole, colours, "Prefill, one prompt", "tokens of the prompt", f"c{number}-p")]


def _over_tokens(
    one: TimedOn, batches: Sequence[BatchShape], colours: Mapping[str, int], title: str, x_label: str, name: str
) -> Chart:
    ordered = sorted(batches, key=lambda batch: batch.max_seq_len)
    series, header, rows = [], ["batch"], [[str(batch)] for batch in ordered]
    for backend in one.backends:
        found = [(batch, one.times.get((backend, batch))) for batch in ordered]
        points = [(float(batch.max_seq_len), each.time_us) for batch, each in found if each is not None]
        if points:
            series.append(Line(backend, points, colours[backend]))
            header.append(f"{backend} (us)")
            for row, (_, each) in zip(rows, found, strict=True):
                row.append(f"{each.time_us:.4g}" if each is not None else "–")
    least = [(float(batch.max_seq_len), time) for batch in ordered if (time := one.roofline(batch)) is not None]
    if least:
        series.append(Line("roofline", least, None))
        header.append("roofline (us)")
        for row, (_, time) in zip(rows, least, strict=True):
            row.append(f"{time:.4g}")
    told = f"{title}: time of one layer's step against context, for {', '.join(line.name for line in series)}"
    svg = lines(series, x_label, "time (us)", theme=PAGE)
    return Chart(title, in_page(svg, name, f"{told}. {one.title}, {one.gpu}"), header, rows)


def _roofline_chart(one: TimedOn, colours: Mapping[str, int], number: int) -> list[Chart]:
    if one.device is None:
        return []
    series, header, rows = [], ["batch", "roofline (us)", *one.backends], []
    for backend in one.backends:
        points = []
        for batch in one.batches:
            found, least = one.times.get((backend, batch)), one.roofline(batch)
            if found is not None and least is not None:
                points.append((least, least / found.time_us * 100))
        if points:
            series.append(Line(backend, points, colours[backend], joined=False))
    if not series:
        return []
    for batch in one.batches:
        least = one.roofline(batch)
        shares = [one.times.get((backend, batch)) for backend in one.backends]
        if least is not None:
            cells = [f"{least / each.time_us * 100:.1f} %" if each is not None else "–" for each in shares]
            rows.append([str(batch), f"{least:.4g}", *cells])
    title = "Share of the roofline"
    svg = lines(series, "least time of the batch (us)", "share of the roofline (%)", theme=PAGE, log_y=False, top=100)
    told = f"{title}, every batch, for {', '.join(line.name for line in series)}. {one.title}, {one.gpu}"
    return [Chart(title, in_page(svg, f"c{number}-r", told), header, rows)]


def _scaling_chart(one: TimedOn, colours: Mapping[str, int], number: int) -> list[Chart]:
    """Return how much faster than one rank several are, for batches that both were measured with."""
    found = {key: times for key, times in one.over_ranks.items() if 1 in times}
    if not found:
        return []
    counts = sorted({ranks for times in found.values() for ranks in times})
    series, rows = [], []
    for backend in sorted({backend for backend, _ in found}):
        of_backend = {batch: times for (name, batch), times in found.items() if name == backend}
        points = []
        for ranks in counts:
            shares = [times[1].time_us / times[ranks].time_us for times in of_backend.values() if ranks in times]
            if shares:
                points.append((float(ranks), geometric_mean(shares)))
        series.append(Line(backend, points, colours[backend]))
        for batch in sorted(of_backend, key=lambda batch: (batch.num_kv_tokens, str(batch))):
            times = of_backend[batch]
            cells = [f"{times[ranks].time_us:.4g}" if ranks in times else "–" for ranks in counts]
            last = times.get(counts[-1])
            share = "–" if last is None else f"{times[1].time_us / last.time_us / counts[-1]:.0%}"
            rows.append([str(batch), backend, *cells, share])
    series.append(Line("ideal", [(float(ranks), float(ranks)) for ranks in counts], None))
    header = ["batch", "backend", *(f"{ranks} rank{'s' if ranks > 1 else ''} (us)" for ranks in counts)]
    header.append(f"efficiency of {counts[-1]}")
    title = "Scaling over ranks"
    svg = lines(series, "ranks that share the cache", "times as fast as one rank", theme=PAGE, log_y=False)
    told = f"{title}: geometric mean of the batches, for {', '.join(line.name for line in series)}"
    return [Chart(title, in_page(svg, f"c{number}-s", f"{told}. {one.title}, {one.gpu}"), header, rows)]


def regret_groups(
    timed: Iterable[TimedOn],
    rules: RuleSet,
    pins: Mapping[str, str],
    measurements: Sequence[str],
) -> list[RegretGroup]:
    """Return for each layer and GPU what the choice costs over the fastest, with and without a workload, by profile."""
    groups = []
    for number, one in enumerate(timed):
        if one.device is None:
            continue
        environment = environment_for(one.device, pins)
        rows = [
            (profile, *found)
            for profile in PROFILES
            if (found := _regret(one, profile, environment, rules, measurements)) is not None
        ]
        if not rows:
            continue
        drawn = [
            Bar(kind, value, None, index, profile)
            for profile, *values, _ in rows
            for index, (kind, value) in enumerate(zip(("by rules alone", "with the workload"), values, strict=True))
        ]
        svg = bars(drawn, "time over the fastest", reference=1.0, theme=PAGE)
        table = [[profile, f"{plain:.3f}", f"{known:.3f}", best] for profile, plain, known, best in rows]
        header = ["workload", "by rules alone", "with the workload", "fastest"]
        told = f"Regret per workload, by rules alone and with the workload. {one.title}, {one.gpu}"
        groups.append(RegretGroup(one.title, one.gpu, Chart("Regret", in_page(svg, f"g{number}", told), header, table)))
    return groups


def _regret(
    one: TimedOn, profile: str, environment: Environment, rules: RuleSet, measurements: Sequence[str]
) -> tuple[float, float, str] | None:
    """Return the regret by rules alone, that with the workload, and the fastest backends; None where times lack."""
    device, workload = one.device, parse_workload(profile)
    plain = select(one.config, device, rules, environment=environment)
    known = select(
        one.config, device, rules, environment=environment, workload=workload, measurements=tuple(measurements)
    )
    totals, fastest = [0.0, 0.0, 0.0], []
    for phase in known.selected:
        timings = {
            candidate.backend: verdict.timing
            for candidate in known.candidates
            if (verdict := candidate.phases[phase]).timing is not None and verdict.behind is not None
        }
        if not workload.of_phase(phase, one.config):
            continue
        chosen = [name for name in (plain.selected[phase], known.selected[phase]) if name in timings]
        if len(chosen) < 2:
            return None
        best = min(timings, key=lambda name: timings[name].time_us)
        for index, name in enumerate([*chosen, best]):
            totals[index] += timings[name].share * timings[name].time_us
        fastest.append(best)
    if not fastest:
        return None
    return totals[0] / totals[2], totals[1] / totals[2], " / ".join(dict.fromkeys(fastest))


def titles_of(layers: Iterable[tuple[str, str, AttentionConfig, Device]]) -> dict[tuple[TimedLayer, str], str]:
    """Return what readers know each layer and GPU by: the models and kinds that it is in."""
    found: dict[tuple[TimedLayer, str], dict[str, None]] = defaultdict(dict)
    for model, kind, config, device in layers:
        found[timed_layer(config), device.name][f"{model} {kind}"] = None
    return {key: _several(list(names)) for key, names in found.items()}


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
