"""One KV layout and block size for all layer kinds that share a cache pool."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.layer.layer_config import ConfigT

_TIE = 0.02
"""Times that differ by no more than this share are a tie."""
_UNRANKED = 1000
"""More than there are backends."""


class Decide(Protocol):
    """How one layer is decided; with ``kv_layout`` only plans that read it count."""

    def __call__(self, config: Any, kv_layout: str | None = None) -> Selection[Any]: ...


def agree_on_pool(configs: Iterable[ConfigT], decide: Decide) -> tuple[Selection[ConfigT], ...]:
    """Decide for layer kinds, and again where kinds of one pool want different layouts or block sizes.

    Layer kinds share a pool when they have a KV cache and are of one sort (MLA, sparse MLA, other). The combination of
    layout and block size with the least time wins, of one layer of each kind, where times of all are known. Among those
    within 2 % of it, or among all, the least sum of ranks over all kinds and phases wins, the earlier kind's wish on a
    tie.
    A block size that a config names is never replaced: it is the only one tried.
    """
    result = list(map(decide, configs))
    for sort in {s.config.sort for s in result} - {"state"}:  # every kind of states has a pool of its own
        members = [i for i, s in enumerate(result) if s.kv_layout and s.config.sort == sort]
        wishes = {(result[i].kv_layout, result[i].block_size) for i in members}
        if len(wishes) > 1:
            _agree(result, members, decide)
    return tuple(result)


def _agree(selections: list[Any], members: list[int], decide: Decide) -> None:
    wanted = [selections[i] for i in members]
    layouts = dict.fromkeys(layout for s in wanted for plan in s.plans.values() for layout in plan.kv_layouts)
    named = dict.fromkeys(s.config.block_size for s in wanted if s.config.block_size is not None)
    if len(named) > 1:
        raise ConfigError(
            f"block_size = {' and '.join(map(str, named))}: layer kinds that share a cache pool name different sizes",
            fields=["block_size"],
            hint="give all layer kinds one block size, or leave block_size out",
        )
    wishes = [s.block_size for s in wanted if s.block_size is not None]
    sizes = named or dict.fromkeys((*wishes, math.lcm(*wishes)))
    trials = [
        [decide(s.config.model_copy(update={"block_size": size}), layout) for s in wanted]
        for layout in layouts
        for size in sizes
    ]
    trials = [trial for trial in trials if all(s.ok for s in trial)]
    best = min(_fastest(trials), key=lambda trial: sum(map(_rank_sum, trial)), default=None)
    if best is None and named:
        (size,) = named
        alone = [decide(s.config.model_copy(update={"block_size": size})) for s in wanted]
        if not all(s.ok for s in alone):
            for i, selection in zip(members, alone, strict=True):
                text = f"block size {size}, which another layer kind of the pool names, has no backend for this kind"
                selections[i] = selection if selection.ok else replace(selection, warnings=(*selection.warnings, text))
            return
    if best is None:
        kinds = "; ".join(f"{s.kv_layout} with block size {s.block_size}" for s in wanted)
        text = f"no KV layout and block size serves all layer kinds of the pool, each keeps its own: {kinds}"
        for i in members:
            selections[i] = replace(selections[i], warnings=(*selections[i].warnings, text))
        return
    for i, selection in zip(members, best, strict=True):
        before = selections[i]
        if (before.kv_layout, before.block_size, before.selected) != (
            selection.kv_layout,
            selection.block_size,
            selection.selected,
        ):
            text = (
                f"shares its pool with other layer kinds: KV layout {selection.kv_layout} and block size "
                f"{selection.block_size} instead of {before.kv_layout} and {before.block_size}"
            )
            selection = replace(selection, warnings=(*selection.warnings, text))
        selections[i] = selection


def _fastest(trials: list[list[Selection]]) -> list[list[Selection]]:
    """Return the trials with the least time of one layer of each kind, ties included; all of them where one has a kind
    without times."""
    times: list[float] = []
    for trial in trials:
        known = [s.evidence.time_us for s in trial if s.evidence is not None and s.evidence.time_us is not None]
        if len(known) < len(trial):
            return trials
        times.append(math.fsum(known))
    return [trial for trial, time_us in zip(trials, times, strict=True) if time_us <= min(times) * (1 + _TIE)]


def _rank_sum(selection: Selection) -> int:
    """Return the sum of the selected backends' ranks; one that no rule ranks stands behind all others."""
    verdicts = [v for c in selection.candidates for v in c.phases.values() if v.verdict == "selected"]
    return sum(v.rank if v.rank is not None else _UNRANKED for v in verdicts)
