"""Judge the packaged rules that rest on times by the packaged models, and make their orders and figures anew.

    python measure/bench/make_rules.py             # what every rule claims, and what the models say
    python measure/bench/make_rules.py --write     # of the rules that times cover, ``prefer`` and ``because``

A rule's ``when`` names a family of layers, which people choose by what kernels depend on. Of it this program takes the
layers that have packaged times, and the batches of a prior: even and uneven decodes, few long requests among many short
ones, prefills with and without history, mixed steps. The order is the one with the least expected time among the
backends whose worst case stays below ``WORST`` times the best. The present first one stays where it loses less than
``NEAR``. What no packaged time covers is named, and kept as it is written.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from attn_select import select
from attn_select.layer.config import PHASES, Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.device import lookup
from attn_select.machine.environment import Environment
from attn_select.rules.ranking import Ranker
from attn_select.rules.rule import Rule, parse_rule
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.fitted import PACKAGED_FOLDER
from attn_select.times.timed_layer import layer_from_dict
from attn_select.times.workload import WeightedShape, Workload, phases_of
from attn_select_cli.rules_file import read_text, rules_in, with_rule

GPU = "h200"
ENVIRONMENT = Environment(assume_installed=True, pins={"triton": "3.6.0"})
"""What the packaged times were measured with."""
RULES = Path(__file__).resolve().parents[2] / "selector_rules.toml"
DECODES = [f"{n}q1s{length}" for n in (1, 4, 16, 64, 256) for length in (512, 2048, 8192, 32768) if n * length <= 2**20]
FEW_LONG = [
    f"{long}q1s{32 * length}_{n}q1s{length}" for long in (1, 4) for n in (2, 8, 32) for length in (256, 1024, 4096)
]
UNEVEN = [f"{n // 8}q1s{8 * length}_{n - n // 8}q1s{length}" for n in (8, 32, 64) for length in (256, 1024, 4096)]
PREFILLS = [f"{n}q{length}" for n in (1, 4) for length in (256, 1024, 4096)]
HISTORY = [f"q{length}s{length + 8192}" for length in (256, 1024, 4096)]
MIXED = [f"q512s2048_{n}q1s4096" for n in (8, 32, 64)]
PRIOR = [parse_batch_shape(text) for text in (*DECODES, *UNEVEN, *FEW_LONG, *PREFILLS, *HISTORY, *MIXED)]
"""The batches that a service without a workload is taken to have, all with one weight."""
WORST, NEAR = 2.0, 0.02
COVERED = 0.9
"""A backend leads only with times of this share of a family's batches."""


@dataclass(slots=True)
class Family:
    """What the models say of one rule in one phase.

    Attributes:
        rule: its name.
        phase: decode or prefill.
        first: the backend that it puts first.
        layers: how many kinds of layers with packaged times it holds for.
        times: microseconds by backend, for each layer and batch.
    """

    rule: str
    phase: Phase
    first: str
    layers: int = 0
    times: list[Mapping[str, float]] = field(default_factory=list)

    def cost(self, name: str) -> tuple[float, float] | None:
        """Return the mean and the worst of a backend's time over the best one's; None where too few times are known."""
        known = [times[name] / min(times.values()) for times in self.times if name in times]
        if len(known) < max(1.0, COVERED * len(self.times)):
            return None
        return sum(known) / len(known), max(known)

    def order(self) -> list[str]:
        """Return the backends by expected time, first the ones below the bound; the present first one wins a tie."""
        names = {name for times in self.times for name in times}
        costs = {name: found for name in names if (found := self.cost(name)) is not None}
        ranked = sorted(costs, key=lambda name: (costs[name][1] > WORST, costs[name][0], name))
        if self.first in costs and costs[self.first][1] <= WORST and costs[self.first][0] <= costs[ranked[0]][0] + NEAR:
            ranked.insert(0, ranked.pop(ranked.index(self.first)))
        return ranked

    def because(self) -> str:
        """Return the figures that speak for the order, for people."""
        leader, *others = self.order()
        told = []
        for name in others:
            logs = [math.log(times[name] / times[leader]) for times in self.times if {name, leader} <= times.keys()]
            told.append(f"{name} {'' if told else 'takes '}{math.exp(sum(logs) / len(logs)):.2f}")
        mean, worst = self.cost(leader) or (1.0, 1.0)
        many = f"{len(self.times)} {'decodes' if self.phase == 'decode' else 'prefills and mixed steps'}"
        return (
            f"by the times of an H200 {', '.join(told)} times {leader}'s time; {leader} takes {mean:.2f} times "
            f"the best on average, {worst:.2f} at worst ({many}, {self.layers} kinds of layers)"
        )


@cache
def packaged_layers() -> list[LayerConfig]:
    """Return the layers that have packaged times on the GPU."""
    lines = (PACKAGED_FOLDER / "nvidia-h200.jsonl").read_text("utf-8").splitlines()
    return [layer.config for layer in dict.fromkeys(layer_from_dict(json.loads(line)["config"]) for line in lines)]


def drafting(batch: BatchShape, query_len: int) -> BatchShape:
    """Return a batch with so many new tokens in each decode."""
    groups = [replace(group, query_len=query_len) if group.query_len == 1 else group for group in batch.groups]
    return BatchShape(tuple(groups))


@cache
def times_of(config: LayerConfig, batch: BatchShape, phase: Phase) -> Mapping[str, float]:
    """Return the predicted time of every backend that can run a batch, microseconds."""
    found = select(config, GPU, environment=ENVIRONMENT, workload=_alone(batch))
    times = {}
    for candidate in found.candidates:
        timing = candidate.phases[phase].timing if phase in candidate.phases else None
        if timing is not None and timing.compares and timing.kind == "packaged":
            times[candidate.backend] = timing.time_us
    return times


def _alone(batch: BatchShape) -> Workload:
    return Workload(str(batch), (WeightedShape(batch, 1.0),))


def families(tables: Sequence[Mapping[str, Any]]) -> Iterator[Family]:
    """Yield what the models say of each rule with the key ``measured``, phase by phase."""
    for number, table in enumerate(tables):
        if "measured" not in table or "prefer" not in table:
            continue
        rule = parse_rule(dict(table), file=str(RULES), line=number, layer=0)
        for phase in (rule.phase,) if rule.phase else PHASES:
            yield family_of(rule, table["prefer"][0], phase)


def family_of(rule: Rule, first: str, phase: Phase) -> Family:
    """Return what the models say of a rule in one phase."""
    found = Family(rule.name, phase, first)
    ranker = Ranker([rule], lookup(GPU), ENVIRONMENT, [])
    for config in packaged_layers():
        held = 0
        for batch in (drafting(each, config.max_decode_query_len) for each in PRIOR):
            if phase not in config.phases or phases_of(batch, config)[0] != phase:
                continue
            ranking = ranker.rank(config, [phase], batches={phase: [batch]})[phase]
            if first in ranking.order and len(times := times_of(config, batch, phase)) > 1:
                found.times.append(times)
                held += 1
        found.layers += held > 0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write prefer and because of the rules that times cover")
    arguments = parser.parse_args()
    text = read_text(RULES)
    tables = rules_in(text)
    by_rule: dict[str, list[Family]] = defaultdict(list)
    for family in families(tables):
        by_rule[family.rule].append(family)
    for table in tables:
        found = [family for family in by_rule.get(table["name"], ()) if family.times]
        if table["name"] in by_rule and not found:
            print(f"{table['name']}: no packaged times, kept as it is written")
        for family in found:
            print(f"{family.rule}, {family.phase}: {family.because()}")
            if family.order()[0] != family.first:
                print(f"  the rule puts {family.first} first: {family.cost(family.first) or 'too few times'}")
        if arguments.write and len(found) == 1:  # else decodes and prefills may want different orders
            order = found[0].order()[: len(table["prefer"])]
            others = [name for name in table["prefer"] if name not in order]
            prefer = [*order, *others][: len(table["prefer"])]
            text = with_rule(text, {**table, "prefer": prefer, "because": found[0].because()})
    if arguments.write:
        RULES.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
