"""Rules out of measured times: the tables that a rules file gets, and what newer measurements say against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from attn_select.errors import ConfigError
from attn_select.layer.config import MLA_DIMS, AttentionConfig, Phase
from attn_select.machine.device import CPU, Device, find_gpu
from attn_select.machine.environment import Environment
from attn_select.rules.conditions import UNSET
from attn_select.rules.document import Problem
from attn_select.rules.ranking import Ranker
from attn_select.rules.rule import Rule
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.measurement import Measurement
from attn_select.times.regions import FIELDS, Region
from attn_select.times.timed_layer import timed_layer
from attn_select.times.tuning import TIE
from attn_select.times.workload import WeightedShape, Workload

_LONGEST_NAME = 80


def rule_prefix(config: AttentionConfig, device: Device) -> str:
    """Return what the names of a layer's tuned rules on a device begin with."""
    fields = timed_layer(config).to_dict()
    shown = ["num_heads", *MLA_DIMS] if config.mla else ["num_heads", "num_kv_heads", "head_size"]
    sizes = "x".join(str(getattr(config, name)) for name in shown)
    rest = [f"{name}-{value}" if value is not True else name for name, value in fields.items() if name not in shown]
    text = " ".join(["tuned", device.name, "mla" if config.mla else "", sizes, *rest])
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
    if len(name) > _LONGEST_NAME:
        import hashlib

        name = f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def rule_tables(
    config: AttentionConfig,
    device: Device,
    phase: Phase,
    regions: Sequence[Region],
    libraries: Mapping[str, Mapping[str, str]],
    measured: str,
    any_batch: bool = True,
) -> list[dict[str, Any]]:
    """Return the rules of a layer's regions in one phase, as tables of a rules file, in order.

    Args:
        any_batch: whether the first region, which has no bounds, gets a rule.
        config: the layer.
        device: what was measured on.
        phase: the phase.
        regions: first the one without bounds.
        libraries: versions by distribution, by backend.
        measured: when, ISO 8601.
    """
    tables = []
    for number, region in enumerate(regions, 1):
        if number == 1 and not any_batch:
            continue
        tables.append(
            {
                "name": f"{rule_prefix(config, device)}-{phase}{'' if number == 1 else f'-{number}'}",
                "phase": phase,
                "when": _when(config, device, region, libraries),
                "prefer": list(region.order),
                "because": _because(region, measured),
                "measured": measured,
            }
        )
    return tables


def tuned_before(
    rules: Iterable[Mapping[str, Any]], config: AttentionConfig, device: Device, phase: Phase
) -> list[Mapping[str, Any]]:
    """Return those of a file's rules that earlier tunings of this layer and phase wrote, by their names."""
    name = f"{rule_prefix(config, device)}-{phase}"
    return [rule for rule in rules if rule["name"] == name or rule["name"].removeprefix(f"{name}-").isdecimal()]


def regions_of(
    rules: Sequence[Mapping[str, Any]],
    config: AttentionConfig,
    device: Device,
    libraries: Mapping[str, Mapping[str, str]],
) -> list[Region]:
    """Return the regions that tuned rules speak of; none where one is for other libraries or was written by hand.

    The first one has bounds where any other batch keeps the order of other rules.
    """
    regions = []
    for rule in rules:
        when = rule.get("when", {})
        bounds = {name: _bound(when[name]) for name in FIELDS if name in when}
        region = Region(
            list(rule.get("prefer", ())), {name: bound for name, bound in bounds.items() if bound is not None}
        )
        if None in bounds.values() or not region.order or when != _when(config, device, region, libraries):
            return []
        regions.append(region)
    return regions


def _bound(written: object) -> tuple[float | None, float | None] | None:
    """Return the least and the greatest number that a condition as ``Region.conditions`` writes it has."""
    number = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"(?:>={number})?,?(?:<={number})?|{number}", str(written))
    if match is None:
        return None
    low, high, equal = (None if text is None else float(text) if "." in text else int(text) for text in match.groups())
    return (low, high) if equal is None else (equal, equal)


def _when(
    config: AttentionConfig, device: Device, region: Region, libraries: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    versions = {name: v for each in region.order for name, v in libraries.get(each, {}).items()}
    when: dict[str, Any] = {"gpu": device.name, **region.conditions(), **_layer_conditions(config)}
    if versions:
        when["library"] = {name: version.partition("+")[0] for name, version in sorted(versions.items())}
    return when


def _layer_conditions(config: AttentionConfig) -> dict[str, Any]:
    """Return the conditions that tell a layer from those whose times are others."""
    fields = timed_layer(config).to_dict()
    conditions: dict[str, Any] = {"mla": config.mla}
    if config.mla:
        conditions["sparse"] = config.sparse
    conditions |= {name: value for name, value in fields.items() if name != "num_kv_heads" or not config.mla}
    conditions |= {"dtype": config.dtype, "kv_cache_dtype": fields.get("kv_cache_dtype", "auto")}
    if config.logits_soft_cap is not None:
        conditions["logits_soft_cap"] = ">0"
    for name in ("sliding_window", "attention_chunk_size", "logits_soft_cap"):
        conditions.setdefault(name, UNSET)
    for name in ("sinks", "batch_invariant"):
        conditions.setdefault(name, False)
    return conditions


def _because(region: Region, measured: str) -> str:
    """Return the figures that speak for a region, for people."""
    text = f"measured {measured[:10]}"
    if region.sample is None:
        return text
    leader = region.order[0]
    text += f": {leader} {_us(region.times[leader])} us"
    if region.against is not None:
        text += f" against {region.against}'s {_us(region.times[region.against])} us"
    text += f" at {region.sample}"
    if region.decided > 1:
        text += f"; the fastest or within {TIE:.0%} of it in {region.right} of {region.decided} batches"
    return text


def _us(time_us: float) -> str:
    return f"{time_us:.3g}" if time_us < 1000 else f"{time_us:.0f}"


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
            told = f"{best.backend} {_us(best.time_us)} us against {_us(leader.time_us)} us at {best.batch}"
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
    """Whether a rule speaks of what was measured: device, libraries, layer, batch and phase."""
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
