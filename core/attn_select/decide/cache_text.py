"""Texts about a layer's cache, as lines: its shape and size, which layers share one, what its ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attn_select.decide.lines import Line, byte_text, row, us_text
from attn_select.decide.outcome import Outcome

if TYPE_CHECKING:
    from attn_select.layer.models.kv_sharing import CacheOwners


def cache_lines(selection: Outcome[Any], count: int | None, owners: CacheOwners | None) -> list[Line]:
    """Say what layers of one kind cache, a state or keys and values; nothing where they cache nothing."""
    if selection.cache_shape is None:
        return []
    if selection.bytes_per_request is not None:
        return [row("State", (_state_text(selection, selection.bytes_per_request, count or 1), ""))]
    if selection.bytes_per_token is None:
        return []
    text = _kv_text(selection, selection.bytes_per_token, count or 1, owners)
    shared = [] if owners is None else shared_cache_lines(owners)
    return [row("KV cache", (text, "")), *shared, *_rank_lines(selection)]


def _stored(selection: Outcome[Any]) -> str:
    return f"{selection.kv_layout} ({', '.join(map(str, selection.cache_shape or ()))}) {selection.stored_dtype}"


def _state_text(selection: Outcome[Any], own: int, count: int) -> str:
    text = f"{_stored(selection)}, {byte_text(own)} per request and layer, whatever its length"
    return text + (f", {byte_text(own * count)} per request for all {count}" if count > 1 else "")


def _kv_text(selection: Outcome[Any], own: int, count: int, owners: CacheOwners | None) -> str:
    """Return how the KV cache lies in memory and how large it is, of one layer and of those that own one."""
    indexer = selection.indexer_bytes_per_token
    text = f"{_stored(selection)}, block size {selection.block_size}, {own} bytes per token and layer"
    text += f" and {indexer} of the indexer's keys in FP8" if indexer else ""
    if count == 1:
        return text
    caches, indexers = (count, count) if owners is None else (owners.caches, owners.indexers)
    whose = f"for all {count}" if caches == count else f"for the {caches} of {count} that own one"
    if indexer and indexers != count:
        whose += f", {indexers} of them with an indexer"
    return f"{text}, {byte_text(own * caches + indexer * indexers)} per token {whose}"


def shared_cache_lines(owners: CacheOwners) -> list[Line]:
    """Say which layers read another layer's cache, a line for each layer that is read."""
    lines: list[Line] = []
    for source in dict.fromkeys(owners.kv_sources.values()):
        readers = _ranges([layer for layer, read in owners.kv_sources.items() if read == source])
        lines.append(row("", (f"layers {readers} read the cache of layer {source}", "dim")))
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, neighbours as a range: ``15-18, 20``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _rank_lines(selection: Outcome[Any]) -> list[Line]:
    """Say what context parallelism saves and adds; nothing for layers of one rank."""
    costs = selection.rank_costs
    if costs is None:
        return []
    from attn_select.times.ranks import MEASURED_ON  # few layers have ranks

    text = f"{costs.ranks} share the cache: {costs.bytes_per_token:g} of {selection.bytes_per_token} bytes per token "
    lines = [row("Ranks", (text + "and layer on each", ""))]
    for step in costs.steps:
        pays = "saves memory, no time: the heads of all ranks keep each one busy"
        if step.pays_from is not None:
            pays = f"pays from {step.pays_from} tokens of context on"
        text = f"{step.batch}: attention takes {us_text(step.ranks_us)} instead of {us_text(step.alone_us)} (at peak "
        text += f"rates), collectives add {us_text(step.collectives_us)} (as on {MEASURED_ON}); {pays}"
        lines.append(row("", (text, "")))
    if not costs.steps:
        lines.append(row("", (f"times of collectives on {selection.device.name} are not known", "")))
    return lines
