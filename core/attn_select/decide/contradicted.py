"""Rules that rest on times, and what newer measurements say against them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.device import CPU, find_gpu
from attn_select.machine.environment import Environment
from attn_select.rules.document import Problem
from attn_select.rules.ranking import Ranker
from attn_select.rules.rule import Rule
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.measurement import Measurement
from attn_select.times.timing import TIE, us_figure
from attn_select.times.workload import WeightedShape, Workload


def contradicted(rules: Iterable[Rule], measurements: Iterable[Measurement]) -> Iterator[Problem]:
    """Yield a problem for every rule with a date whose first backend newer measurements show to be behind.

    Compared are measurements of one layer and batch by one method from one source, among the backends that the rule
    lists. A backend is behind where another one is faster by more than a tie and their quartiles lie apart.
    """
    dated = [rule for rule in rules if rule.measured is not None and rule.effect == "prefer"]
    if not dated:
        return
    groups: dict[tuple[Any, ...], dict[str, Measurement]] = {}
    for each in measurements:
        same = (each.gpu, tuple(each.config.items()), each.batch, each.method, each.source)
        kept = groups.setdefault(same, {})
        if each.backend not in kept or kept[each.backend].date <= each.date:
            kept[each.backend] = each
    for rule in dated:
        worst: tuple[float, str] | None = None
        count = 0
        for group in groups.values():
            newer = {n: m for n, m in group.items() if n in rule.backends and _is_newer(m.date, rule.measured or "")}
            if len(newer) < 2 or rule.backends[0] not in newer:
                continue
            leader = newer[rule.backends[0]]
            best = min(newer.values(), key=lambda m: m.time_us)
            if leader.time_us < best.time_us * (1 + TIE) or not _apart(best, leader) or not _applies(rule, newer):
                continue
            count += 1
            told = f"{best.backend} {us_figure(best.time_us)} us against {us_figure(leader.time_us)} us at {best.batch}"
            worst = max(worst or (0.0, ""), (leader.time_us / best.time_us, told))
        if worst is not None:
            more = f", and {count - 1} more" if count > 1 else ""
            text = f"newer measurements contradict {rule.backends[0]} first: {worst[1]}{more}; `attn-select tune` again"
            yield rule.file, rule.line, f"rule {rule.name!r}: {text}"


def _is_newer(date: str, than: str) -> bool:
    try:
        return _moment(date) > _moment(than)
    except ValueError:  # a table without a date
        return False


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _apart(faster: Measurement, slower: Measurement) -> bool:
    if faster.spread_us is None or slower.spread_us is None:
        return True
    return faster.spread_us[1] < slower.spread_us[0]


def _applies(rule: Rule, measured: Mapping[str, Measurement]) -> bool:
    """Whether a rule holds for a measurement: its device, libraries, layer, batch and phase."""
    first = next(iter(measured.values()))
    device = CPU if first.compute_capability == CPU.name else find_gpu(first.gpu)
    if device is None:
        return False
    versions = {name: version for each in measured.values() for name, version in each.libraries.items()}
    try:
        config, batch = AttentionConfig(**first.config), parse_batch_shape(first.batch)
    except ConfigError:
        return False
    phase: Phase = "decode" if Workload("", (WeightedShape(batch, 1.0),)).of_phase("decode", config) else "prefill"
    ranker = Ranker([rule], device, Environment(assume_installed=True, pins=versions), [])
    return rule in ranker.rank(config, [phase], batches={phase: [batch]})[phase].rules
