"""Rules out of measured times: the tables that a rules file gets, and what newer measurements say against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attn_select.layer.config import MLA_DIMS, Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.rules.conditions import UNSET
from attn_select.times.timed_layer import timed_layer
from attn_select.times.timing import TIE, us_figure
from attn_select_measure.regions import FIELDS, Region

_LONGEST_NAME = 80


def rule_prefix(config: LayerConfig, device: Device) -> str:
    """Return how tuned rules call a layer on a device."""
    fields = timed_layer(config).to_dict()
    shown = ["num_heads", "num_kv_heads", "head_size"]
    kind = ""
    if isinstance(config, StateConfig):
        kind, shown = config.recurrence, ["num_heads", "num_v_heads", "head_size", "v_head_size"]
    elif config.mla:
        kind, shown = "mla", ["num_heads", *MLA_DIMS]
    sizes = "x".join(str(getattr(config, name)) for name in shown)
    others = {name: value for name, value in fields.items() if name not in (*shown, "recurrence")}
    rest = [f"{name}-{value}" if value is not True else name for name, value in others.items()]
    text = " ".join(["tuned", device.name, kind, sizes, *rest])
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
    if len(name) > _LONGEST_NAME:
        import hashlib

        name = f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def rule_tables(
    config: LayerConfig,
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
                "tuned": f"{rule_prefix(config, device)}-{phase}",
            }
        )
    return tables


def tuned_before(
    rules: Iterable[Mapping[str, Any]], config: LayerConfig, device: Device, phase: Phase
) -> list[Mapping[str, Any]]:
    """Return the rules of a file that an earlier tune of this layer and phase wrote, by the key ``tuned``."""
    return [rule for rule in rules if rule.get("tuned") == f"{rule_prefix(config, device)}-{phase}"]


def regions_of(
    rules: Sequence[Mapping[str, Any]],
    config: LayerConfig,
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
    config: LayerConfig, device: Device, region: Region, libraries: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    versions = {name: v for each in region.order for name, v in libraries.get(each, {}).items()}
    when: dict[str, Any] = {"gpu": device.name, **region.conditions(), **_layer_conditions(config)}
    if versions:
        when["library"] = {name: version.partition("+")[0] for name, version in sorted(versions.items())}
    return when


def _layer_conditions(config: LayerConfig) -> dict[str, Any]:
    """Return the conditions that tell a layer from those whose times are others."""
    fields = timed_layer(config).to_dict()
    if isinstance(config, StateConfig):
        return {**fields, "dtype": config.dtype, "state_dtype": config.state_dtype, "chunk_size": config.chunk_size}
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
    text += f": {leader} {us_figure(region.times[leader])} us"
    if region.against is not None:
        text += f" against {region.against}'s {us_figure(region.times[region.against])} us"
    text += f" at {region.sample}"
    if region.decided > 1:
        text += f"; the fastest or within {TIE:.0%} of it in {region.right} of {region.decided} batches"
    return text
