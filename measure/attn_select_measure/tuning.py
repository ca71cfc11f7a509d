"""Surveys a user's own layers, and says what the times are worth: on workloads that took no part in the choice."""

from __future__ import annotations

import random
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from attn_select.decide.selector import RulesArgument, select
from attn_select.errors import ConfigError, MeasurementError
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import LayerConfig, layer_of
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.prediction import SUFFIX, packaged_survey
from attn_select.times.roofline import is_decode
from attn_select.times.workload import WeightedShape, Workload, phases_of
from attn_select_measure.survey_draw import PHASES, SPACE, Space, Work, draw_batch, kind_of, work_of
from attn_select_measure.survey_fit import extended, fit_survey, save
from attn_select_measure.survey_records import PAIR, Record, times_of

LEAST_OTHERS = 100  # Workloads of other layers that must be known before a layer's own times are added to them
_PHASES_OF: Mapping[str, tuple[Phase, ...]] = {
    **dict.fromkeys(("decode", "uneven", "spread"), ("decode",)),
    **dict.fromkeys(("prefill", "chunk"), ("prefill",)),
    "mixed": ("prefill", "decode"),
}


@dataclass(frozen=True, slots=True)
class TunedLayer:
    """One kind of layers that is tuned."""

    name: str
    config: LayerConfig
    seed: int  # of its draws, the same for layers whose times are alike
    requested: Sequence[BatchShape]  # batches that are timed first
    phases: Sequence[str]  # of those that are drawn
    space: Space

    def work(self, number: int) -> Work:
        """Return one workload: those that are asked for first, then drawn ones, the phases in turn."""
        if number < len(self.requested):
            return work_of(self.seed, number, "own", "asked", self.config, self.requested[number])
        rng, first = random.Random(f"{self.seed} {number}"), number % len(self.phases)
        for phase in (*self.phases[first:], *self.phases[:first]):
            if (batch := draw_batch(rng, phase, self.config, self.space)) is not None:
                return work_of(self.seed, number, "own", phase, self.config, batch)
        raise ConfigError(f"{self.name}: no batch of these lengths is small enough to be timed", fields=["workload"])

    def is_held_out(self, number: int) -> bool:
        """Whether a workload judges the choice, and takes no part in it: every third one of each phase."""
        turn, place = divmod(number, len(self.phases))
        return (turn + place) % 3 == 2


def tuned_layer(name: str, config: LayerConfig, workload: Workload | None) -> TunedLayer:
    """Return a layer that is tuned for a workload's batches and what lies between them, or for all batches."""
    seed = zlib.crc32(f"{kind_of(config)} {workload}".encode())
    batches = [shape.batch for shape in workload.shapes] if workload is not None else []
    phases, space = [*PHASES], SPACE
    if not config.has_cache:
        phases = ["prefill"]
        batches = [each for each in batches if all(group.query_len == group.seq_len for group in each.groups)]
    elif batches:
        groups = [group for batch in batches for group in batch.groups]
        queries = [group.query_len for group in groups if not is_decode(config, group.query_len)] or [1]
        lengths, requests = [group.seq_len for group in groups], max(batch.num_requests for batch in batches)
        space = Space(requests, (min(lengths), max(lengths)), (min(queries), max(queries)))
        here = {phases_of(batch, config) for batch in batches}
        phases = [phase for phase in PHASES if _PHASES_OF[phase] in here]
    return TunedLayer(name, config, seed, in_turn(batches, config), phases, space)


def in_turn(batches: Sequence[BatchShape], config: LayerConfig) -> list[BatchShape]:
    """Return the batches with their phases in turn, so that a short tune knows something of each."""
    by_phases: dict[tuple[Phase, ...], list[BatchShape]] = {}
    for batch in batches:
        by_phases.setdefault(phases_of(batch, config), []).append(batch)
    return [batch for turn in zip_longest(*by_phases.values()) for batch in turn if batch is not None]


def plan(layers: Mapping[int, TunedLayer], workloads: int, known: Sequence[Record]) -> Iterator[Work]:
    """Yield so many workloads of each layer, without those that are in the file; the layers in turn."""
    done = {(record["seed"], record["number"]) for record in known}
    for number in range(workloads):
        for seed, layer in layers.items():
            if (seed, number) not in done:
                yield layer.work(number)


def parted(
    layers: Mapping[int, TunedLayer], records: Sequence[Record]
) -> tuple[list[Record], list[Record], list[Record]]:
    """Return the records of other workloads, those of the layers that are added, and those that are held out."""
    others, added, held_out = list[Record](), list[Record](), list[Record]()
    for record in records:
        layer = layers.get(record["seed"])
        into = others if layer is None else held_out if layer.is_held_out(record["number"]) else added
        into.append(record)
    return others, added, held_out


def base_survey(device: Device, gpu: str, others: Sequence[Record], file: Path) -> Mapping[str, Any]:
    """Return what is known without the layers that are tuned: the packaged survey and what else is in the file."""
    packaged = packaged_survey(device)
    if packaged is not None:
        known = {**packaged.data, "gpu": gpu, "rates": asdict(packaged.rates)}
        return extended(known, others) if others else known
    if len(others) >= LEAST_OTHERS:
        return fit_survey(others)
    raise MeasurementError(
        f"there is no survey of {gpu} that the times of single layers could be added to",
        hint=f"`attn-select survey --out {file}` times layers and batches of all kinds first",
    )


def judged(
    held_out: Sequence[Record],
    surveys: Sequence[Mapping[str, Any]],
    device: Device,
    rules: RulesArgument,
    environment: Environment,
) -> dict[int, list[list[float]]]:
    """Return by layers' seed what choices by each survey cost for held-out workloads: the chosen backend's time over
    the least one; a workload on which a choice has no time is left out."""
    found: dict[int, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{index}{SUFFIX}" for index in range(len(surveys))]
        for data, path in zip(surveys, paths, strict=True):
            save(data, path)
        for record in held_out:
            config, batch = layer_of(record["config"]), parse_batch_shape(record["batch"])
            workload = Workload(str(batch), (WeightedShape(batch, 1.0),))
            times = times_of(record)
            regrets = []
            for path in paths:
                selection = select(config, device, rules, environment=environment, workload=workload, times=path)
                names = [selection.selected[phase] or "" for phase in phases_of(batch, config)]
                time_us = times.get(PAIR.join(dict.fromkeys(names)))
                regrets += [] if time_us is None else [time_us / min(times.values())]
            if len(regrets) == len(paths):
                found.setdefault(record["seed"], []).append(regrets)
    return found


def means(regrets: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean by survey."""
    return [geometric_mean(each) for each in zip(*regrets, strict=True)]


def regret_text(regrets: Sequence[Sequence[float]]) -> str:
    """Say what both choices cost."""
    worst = map(max, zip(*regrets, strict=True))
    before, after = (f"{mean:.3f} (worst {most:.2f})" for mean, most in zip(means(regrets), worst, strict=True))
    return f"{before} as it stands, {after} with the times of these layers"
