"""Times in the choice: synthetic kernels with known times, and who has the last word."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attn_select.config import PHASES, AttentionConfig, Phase
from attn_select.decide import Choice, Decider
from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.selection import Selection
from attn_select.spec import BackendPlan, BackendSpec
from attn_select.times.choice import fastest
from attn_select.times.evidence import Evidence
from attn_select.times.layer import timed_layer
from attn_select.times.measurement import Measurement
from attn_select.times.model import fit
from attn_select.times.store import MeasurementFile, Stored, StoredMeasurement
from attn_select.times.timing import Timing
from attn_select.times.workload import parse_workload

LAYER = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
HOPPER = Device("h100", (9, 0), full_name="NVIDIA H100 80GB HBM3", sm_count=132, bandwidth_gbps=3350)
PACKAGED = {"name": "packaged-order", "layer": 0, "priority": ["A", "B", "C"]}
FILES: dict[str, MeasurementFile] = {
    kind: MeasurementFile(kind, Path(f"{kind}.jsonl"))  # type: ignore[arg-type]
    for kind in ("packaged", "user", "named")
}


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str


@pytest.fixture
def spec(make_spec: Any) -> Callable[..., BackendSpec]:
    """Return a factory of backends whose kernel is called as the backend, in small letters."""

    def make(
        name: str, layouts: Sequence[str] = ("FLASH_ATTN_NHD",), kernel: str | None = None, **more: Any
    ) -> BackendSpec:
        def plan(config: AttentionConfig, *_: Any) -> BackendPlan:
            return BackendPlan(
                kernel=Kernel(kernel or name.lower()),
                path="path",
                because="only one",
                query_dtype=config.dtype,
                returns_lse=True,
                kv_layouts=tuple(layouts),
                kernel_block_sizes=(16,),
                cuda_graph="ALWAYS",
                unverified=more.get("unverified", ()),
            )

        return make_spec(name, plan=plan, **{key: value for key, value in more.items() if key != "unverified"})

    return make


@pytest.fixture
def decider(spec: Any, make_decider: Any) -> Callable[..., Decider]:
    """Return a factory: backends A, B and C that can do the same, and rules behind the packaged order."""

    def make(*rules: Mapping[str, Any], specs: Sequence[BackendSpec] | None = None) -> Decider:
        made: Decider = make_decider(specs or [spec("A"), spec("B"), spec("C")], [PACKAGED, *rules], HOPPER)
        return made

    return make


def measured(
    backend: str,
    batch: str,
    time_us: float,
    phase: Phase = "decode",
    file: str = "packaged",
    config: AttentionConfig = LAYER,
    **changes: Any,
) -> StoredMeasurement:
    fields: dict[str, Any] = {
        "gpu": HOPPER.full_name,
        "compute_capability": "9.0",
        "backend": backend,
        "kernel": {phase: backend.lower()},
        "config": timed_layer(config).to_dict(),
        "batch": batch,
        "time_us": time_us,
        "spread_us": (time_us * 0.999, time_us * 1.001),
        "rounds": 20,
        "method": "graph",
        "date": "2026-11-22",
    }
    return StoredMeasurement(Measurement(**{**fields, **changes}), FILES[file], 1)


def decode(times: Mapping[str, float], batch: str = "64q1s4k", **changes: Any) -> list[StoredMeasurement]:
    return [measured(name, batch, time_us, "decode", **changes) for name, time_us in times.items()]


def prefill(times: Mapping[str, float], batch: str = "q2k", **changes: Any) -> list[StoredMeasurement]:
    return [measured(name, batch, time_us, "prefill", **changes) for name, time_us in times.items()]


def known(rows: Sequence[StoredMeasurement], environment: Environment) -> Evidence:
    return Evidence(lambda layer: Stored(tuple(rows), (), ()), HOPPER, environment, fit)


def decide(
    decider: Decider,
    rows: Sequence[StoredMeasurement],
    workload: str = "64q1s4k",
    backend: str | None = None,
    config: AttentionConfig = LAYER,
) -> Selection:
    choice = Choice() if backend is None else Choice(default=backend)
    evidence = known(rows, decider.environment)
    return decider.decide(config, choice, workload=parse_workload(workload), evidence=evidence)


def ranks(selection: Selection, phase: Phase = "decode") -> list[str]:
    ranked = [(c.phases[phase].rank, c.backend) for c in selection.candidates if c.phases[phase].rank is not None]
    return [name for _, name in sorted(ranked)]  # type: ignore[type-var]


def why(selection: Selection, phase: Phase = "decode") -> str:
    assert selection.evidence is not None
    return selection.evidence.phases[phase].why


# The order of authority.


def test_measured_order_beats_the_packaged_rules(decider: Any) -> None:
    selection = decide(decider(), decode({"A": 125, "B": 113, "C": 140}))
    assert selection.selected["decode"] == "B"
    assert ranks(selection) == ["B", "A", "C"]
    assert selection.evidence is not None
    assert selection.evidence.phases["decode"].by_times
    assert ranks(selection, "prefill") == ["A", "B", "C"]
    assert selection.selected["prefill"] == "A"  # no prefill in the workload: what the rules chose stays
    assert why(selection, "prefill") == "the workload has no prefill"


def test_without_evidence_the_rules_rank_and_say_so(decider: Any) -> None:
    selection = decide(decider(), [])
    assert selection.selected == {"prefill": "A", "decode": "A"}
    assert why(selection) == "no times are known for this layer on this device"
    assert selection.evidence is not None
    assert selection.evidence.digest is None
    assert selection.evidence.time_us is None


def test_without_a_workload_no_time_counts(decider: Any) -> None:
    made = decider()
    evidence = known(decode({"A": 125, "B": 113}), made.environment)
    selection = made.decide(LAYER, Choice(), evidence=evidence)
    assert selection.selected["decode"] == "A"
    assert selection.evidence is None


def test_without_evidence_a_workload_meets_rules_alone(decider: Any) -> None:
    made = decider({"name": "many", "prefer": ["C"], "when": {"batch": ">=64"}})
    selection = made.decide(LAYER, Choice(), workload=parse_workload("64q1s4k"))
    assert selection.selected["decode"] == "C"
    assert selection.evidence is None


@pytest.mark.parametrize(
    ("rule", "order"),
    [
        ({"prefer": ["C"]}, ["C", "B", "A"]),
        ({"prefer": ["C", "A"]}, ["C", "A", "B"]),
        ({"avoid": ["B"]}, ["A", "C", "B"]),
        ({"priority": ["A", "B", "C"]}, ["A", "B", "C"]),
        ({"priority": ["C", "A"]}, ["C", "A"]),
        ({"deny": ["B"]}, ["A", "B", "C"]),
        ({"evidence": False}, ["A", "B", "C"]),
        ({"evidence": False, "when": {"seq_len": "<=1024"}}, ["B", "A", "C"]),  # does not match this workload
        ({"prefer": ["C"], "when": {"batch": ">=64"}}, ["C", "B", "A"]),
    ],
)
def test_users_rules_beat_times_which_order_the_rest(decider: Any, rule: dict[str, Any], order: list[str]) -> None:
    selection = decide(decider({"name": "mine", **rule}), decode({"A": 125, "B": 100, "C": 140}))
    assert ranks(selection) == order
    denied = rule.get("deny", [])
    assert selection.selected["decode"] == next(name for name in order if name not in denied)


TUNED = {"name": "tuned", "measured": "2026-11-23"}
MINE = {"name": "mine"}


@pytest.mark.parametrize(
    ("rules", "times", "order"),
    [
        ([{**TUNED, "prefer": ["C"]}], {"A": 125, "B": 100, "C": 140}, ["B", "A", "C"]),
        ([{**TUNED, "prefer": ["C"], "when": {"batch": ">=64"}}], {"A": 125, "B": 100, "C": 140}, ["B", "A", "C"]),
        ([{**TUNED, "prefer": ["B"]}], {"A": 100, "B": 100.5, "C": 140}, ["B", "A", "C"]),  # a tie goes to the rule
        ([{**TUNED, "prefer": ["C"]}], {"A": 125, "B": 100}, ["C", "B", "A"]),  # without a time it keeps its place
        ([{**TUNED, "prefer": ["C", "A"]}, {**MINE, "prefer": ["A"]}], {"A": 3, "B": 2, "C": 1}, ["A", "C", "B"]),
        ([{**MINE, "prefer": ["A"]}, {**TUNED, "prefer": ["B"]}], {"A": 3, "B": 2, "C": 1}, ["B", "A", "C"]),
        ([{**TUNED, "priority": ["A", "B", "C"]}], {"A": 125, "B": 100, "C": 140}, ["A", "B", "C"]),
    ],
)
def test_rules_made_of_times_yield_to_times(
    decider: Any, rules: list[dict[str, Any]], times: dict[str, float], order: list[str]
) -> None:
    selection = decide(decider(*rules), decode(times))
    assert ranks(selection) == order
    assert selection.selected["decode"] == order[0]


def test_without_a_workload_rules_made_of_times_decide(decider: Any) -> None:
    assert decider({**TUNED, "prefer": ["C"]}).decide(LAYER, Choice()).selected["decode"] == "C"


def test_packaged_rules_of_every_effect_yield_to_times(decider: Any) -> None:
    for effect in ("prefer", "avoid"):
        rule = {"name": "packaged-effect", "layer": 0, effect: ["C"]}
        assert ranks(decide(decider(rule), decode({"A": 125, "B": 100, "C": 140}))) == ["B", "A", "C"]
    off = {"name": "packaged-off", "layer": 0, "evidence": False}
    assert ranks(decide(decider(off), decode({"A": 125, "B": 100, "C": 140}))) == ["A", "B", "C"]


def test_why_the_rules_decide_is_said(decider: Any) -> None:
    times = decode({"A": 125, "B": 100, "C": 140})
    priority = decide(decider({"name": "mine", "priority": ["A", "B"]}), times)
    assert why(priority) == "rule 'mine' (rules.toml:2) places A"
    prefer = decide(decider({"name": "mine", "prefer": ["C"]}), times)
    assert why(prefer) == "rule 'mine' (rules.toml:2) places C"
    off = decide(decider({"name": "mine", "evidence": False}), times)
    assert why(off) == "rule 'mine' (rules.toml:2) keeps times out"
    assert why(decide(decider(), times, backend="C")) == "C is asked for by name"


def test_an_explicit_choice_beats_everything(decider: Any) -> None:
    selection = decide(decider(), decode({"A": 125, "B": 100, "C": 140}), backend="C")
    assert selection.selected == {"prefill": "C", "decode": "C"}
    by_name = {c.backend: c.phases["decode"] for c in selection.candidates}
    assert by_name["B"].timing is not None
    assert by_name["B"].behind == pytest.approx(100 / 140)


def test_an_unverified_candidate_that_was_measured_moves_up(decider: Any, spec: Any) -> None:
    specs = [spec("A", unverified=("never executed",)), spec("B"), spec("C")]
    without = decide(decider(specs=specs), [])
    assert ranks(without) == ["B", "C", "A"]
    assert ranks(decide(decider(specs=specs), decode({"A": 100, "B": 120, "C": 140}))) == ["A", "B", "C"]


# What compares with what.


def test_a_candidate_without_a_time_keeps_its_place_and_nothing_passes_it(decider: Any) -> None:
    selection = decide(decider(), decode({"A": 140, "C": 100}))
    assert ranks(selection) == ["A", "B", "C"]
    assert why(selection) == "no neighbour of A in the order has a time that compares with its own"
    shown = {c.backend: c.phases["decode"] for c in selection.candidates}
    assert shown["C"].behind == pytest.approx(100 / 140)
    assert shown["B"].timing is not None
    assert shown["B"].timing.kind == "roofline estimate"
    assert shown["B"].behind is None


def test_a_candidate_that_cannot_run_stands_in_nobodys_way(decider: Any, spec: Any) -> None:
    specs = [spec("A"), spec("B", dtypes=("float16",)), spec("C")]
    selection = decide(decider(specs=specs), decode({"A": 140, "B": 1, "C": 100}))
    assert ranks(selection) == ["C", "B", "A"]
    assert selection.selected["decode"] == "C"
    rejected = next(c for c in selection.candidates if c.backend == "B").phases["decode"]
    assert rejected.timing is None


@pytest.mark.parametrize(
    "other",
    [
        {"method": "eager"},
        {"method": "table", "source": "tables 1.0"},
        {"source": "somebody 2.0"},
        {"file": "user"},
        {"file": "named"},
    ],
)
def test_nothing_is_compared_across_sources(decider: Any, other: dict[str, Any]) -> None:
    selection = decide(decider(), [*decode({"A": 140, "C": 150}), *decode({"B": 10}, **other)])
    assert ranks(selection) == ["A", "B", "C"]
    assert {c.backend: c.phases["decode"].behind for c in selection.candidates if c.backend in "ABC"} == {
        "A": 1.0,
        "B": None,
        "C": pytest.approx(150 / 140),
    }


def test_each_source_orders_what_it_knows_and_the_most_trusted_has_the_last_word(decider: Any, spec: Any) -> None:
    names = ["A", "B", "C", "D"]
    order = {"name": "packaged-order-2", "layer": 0, "prefer": names}
    made = decider(order, specs=[spec(name) for name in names])
    tables = decode(
        {"A": 100, "B": 90, "C": 80, "D": 70}, method="table", source="tables 1.0", rounds=0, spread_us=None
    )
    assert ranks(decide(made, tables)) == ["D", "C", "B", "A"]
    own = decode({"C": 60, "D": 65}, file="user")
    assert ranks(decide(made, [*tables, *own])) == ["C", "D", "B", "A"]
    selection = decide(made, [*tables, *own, *decode({"A": 1, "D": 2})])  # packaged: neighbours only
    assert ranks(selection) == ["C", "D", "B", "A"]
    kinds = {c.backend: c.phases["decode"].timing.kind for c in selection.candidates if c.phases["decode"].timing}
    assert kinds == {"A": "table", "B": "table", "C": "measured here", "D": "measured here"} or kinds["A"] == "packaged"


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "A"},
        {"kernel": {"decode": "b2"}},
        {"kernel": {"prefill": "b"}},
        {"config": {"num_heads": 32, "num_kv_heads": 4, "head_size": 128}},
        {"batch": "32q1s4k"},
    ],
)
def test_a_time_belongs_to_its_gpu_kernel_layer_and_batch(decider: Any, changes: dict[str, Any]) -> None:
    row = measured("B", "64q1s4k", 100)
    assert ranks(decide(decider(), [*decode({"A": 140}), row])) == ["B", "A", "C"]
    fields = {name: getattr(row.measurement, name) for name in type(row.measurement).__slots__}
    other = StoredMeasurement(Measurement(**{**fields, **changes}), row.file, 1)
    assert ranks(decide(decider(), [*decode({"A": 140}), other]))[0] == "A"


def test_block_size_and_graph_wish_share_times(decider: Any) -> None:
    other = LAYER.model_copy(update={"block_size": 32, "cuda_graph": "ALWAYS"})
    assert decide(decider(), decode({"A": 125, "B": 100}), config=other).selected["decode"] == "B"


def test_a_layer_with_drafts_shares_the_prefills_of_the_layer_without(decider: Any) -> None:
    drafting = LAYER.model_copy(update={"num_speculative_tokens": 3})
    rows = prefill({"A": 30.0, "B": 20.0, "C": 10.0}) + prefill({"A": 3.0, "B": 2.0, "C": 1.0}, "64q4s4k")
    assert ranks(decide(decider(), rows, "q2k", config=drafting), "prefill") == ["C", "B", "A"]
    drafts = decide(decider(), rows, "64q4s4k", config=drafting)
    assert ranks(drafts) == ["A", "B", "C"]
    assert why(drafts) == "no times are known for this layer on this device"


def test_all_shapes_of_the_phase_must_be_known(decider: Any) -> None:
    rows = [*decode({"A": 125, "B": 100}), *decode({"A": 12}, batch="8q1s1k")]
    selection = decide(decider(), rows, "64q1s4k,8q1s1k")
    assert selection.selected["decode"] == "A"
    shown = {c.backend: c.phases["decode"].timing for c in selection.candidates}
    assert shown["A"] is not None
    assert shown["A"].time_us == pytest.approx((125 + 12) / 2)
    assert shown["B"] is not None
    assert shown["B"].kind == "roofline estimate"


# Ties.


@pytest.mark.parametrize(("time_us", "first"), [(98.1, "A"), (97.9, "B"), (102, "A"), (100, "A")])
def test_two_percent_are_a_tie(decider: Any, time_us: float, first: str) -> None:
    for workload in ("64q1s4k", "64q1s4k*0.5,q2k*0.5"):
        selection = decide(decider(), decode({"A": 100, "B": time_us}), workload)
        assert selection.selected["decode"] == ranks(selection)[0] == first


@pytest.mark.parametrize(("spread", "first"), [(0.001, "B"), (0.2, "A")])
def test_the_combined_margin_is_a_tie(decider: Any, spread: float, first: str) -> None:
    rows = [
        measured(n, "64q1s4k", t, spread_us=(t * (1 - spread), t * (1 + spread))) for n, t in (("A", 110), ("B", 100))
    ]
    assert decide(decider(), rows).selected["decode"] == first


def test_a_tie_is_with_the_fastest_not_with_the_next(decider: Any) -> None:
    selection = decide(decider(), decode({"A": 103, "B": 101.5, "C": 100}))
    assert ranks(selection) == ["B", "C", "A"]


# Versions.


def versions(decider: Any, *rows: StoredMeasurement, pins: Mapping[str, str], assumed: bool = True) -> Selection:
    made = decider()
    environment = Environment(assume_installed=assumed, pins=pins)
    evidence = known(rows, environment)
    return made.decide(LAYER, Choice(), workload=parse_workload("64q1s4k"), evidence=evidence)


def test_other_versions_count_as_weaker_and_say_so(decider: Any) -> None:
    a, b = measured("A", "64q1s4k", 104), measured("B", "64q1s4k", 100, libraries={"acme": "1.0"})
    assert versions(decider, a, b, pins={"acme": "1.0"}).selected["decode"] == "B"
    assert versions(decider, a, b, pins={}).selected["decode"] == "B"  # an unknown version is not another one
    foreign = versions(decider, a, b, pins={"acme": "2.0"})
    assert foreign.selected["decode"] == "A"  # 4 % are within the wider margin
    timing = next(c for c in foreign.candidates if c.backend == "B").phases["decode"].timing
    assert timing is not None
    assert timing.weaker == "measured with acme 1.0, here 2.0"
    here = versions(decider, a, b, pins={}, assumed=False)
    timing = next(c for c in here.candidates if c.backend == "B").phases["decode"].timing
    assert timing is not None
    assert timing.weaker == "measured with acme 1.0, not installed here"
    far = measured("B", "64q1s4k", 80, libraries={"acme": "1.0"})
    assert versions(decider, a, far, pins={"acme": "2.0"}).selected["decode"] == "B"


def test_times_of_these_versions_come_first_then_the_latest(decider: Any) -> None:
    rows = [
        measured("A", "64q1s4k", 50, libraries={"acme": "3.0"}, date="2026-12-01"),
        measured("A", "64q1s4k", 60, libraries={"acme": "2.0"}, date="2026-11-01"),
        measured("A", "64q1s4k", 70, libraries={"acme": "1.0"}, date="2026-10-01"),
    ]
    for pin, expected in (("1.0", 70), ("2.0", 60), ("3.0", 50), ("4.0", 50)):
        selection = versions(decider, *rows, pins={"acme": pin})
        timing = next(c for c in selection.candidates if c.backend == "A").phases["decode"].timing
        assert timing is not None
        assert timing.time_us == expected
        assert bool(timing.weaker) == (pin == "4.0")


# Pairs.


def test_both_phases_are_chosen_together(decider: Any) -> None:
    rows = [*decode({"A": 125, "B": 100, "C": 300}), *prefill({"A": 500, "B": 900, "C": 2000})]
    assert decide(decider(), rows, "64q1s4k*0.9,q2k*0.1").selected == {"prefill": "A", "decode": "B"}
    assert decide(decider(), rows, "q2k").selected == {"prefill": "A", "decode": "A"}


def test_a_pair_must_share_a_cache(decider: Any, spec: Any) -> None:
    specs = [spec("A"), spec("B", layouts=["FLASHINFER_NHD"]), spec("C")]
    rows = [*decode({"A": 125, "B": 100, "C": 300}), *prefill({"A": 500, "B": 900, "C": 2000})]
    made = decider(specs=specs)
    # A for both takes 0.9 * 125 + 0.1 * 500 = 162.5, B for both 0.9 * 100 + 0.1 * 900 = 180.
    assert decide(made, rows, "64q1s4k*0.9,q2k*0.1").selected == {"prefill": "A", "decode": "A"}
    # 123.75 + 5 against 99 + 9.
    selection = decide(made, rows, "64q1s4k*0.99,q2k*0.01")
    assert selection.selected == {"prefill": "B", "decode": "B"}
    assert selection.kv_layout == "FLASHINFER_NHD"
    # No prefill in the workload: the rules' A stays, and B shares no cache with it.
    assert decide(made, rows, "64q1s4k").selected == {"prefill": "A", "decode": "A"}


def test_a_tie_of_pairs_goes_to_the_rules_then_to_one_backend(decider: Any) -> None:
    rows = [*decode({"A": 100, "B": 99.5, "C": 300}), *prefill({"A": 500, "B": 450, "C": 2000})]
    # A and B tie in decode, B is faster in prefill: B for both ties with A beside B.
    assert decide(decider(), rows, "64q1s4k*0.5,q2k*0.5").selected == {"prefill": "B", "decode": "B"}
    rows = [*decode({"A": 100, "B": 99.5, "C": 300}), *prefill({"A": 500, "B": 499, "C": 2000})]
    assert decide(decider(), rows, "64q1s4k*0.5,q2k*0.5").selected == {"prefill": "A", "decode": "A"}


def test_a_users_rule_about_one_phase_leaves_the_other_to_times(decider: Any) -> None:
    rows = [*decode({"A": 100, "B": 120, "C": 300}), *prefill({"A": 500, "B": 400, "C": 2000})]
    rule = {"name": "mine", "phase": "decode", "prefer": ["C"]}
    selection = decide(decider(rule), rows, "64q1s4k,q2k")
    assert selection.selected == {"prefill": "B", "decode": "C"}
    assert why(selection, "decode") == "rule 'mine' (rules.toml:2) places C"


def test_the_time_of_the_whole_workload_is_the_weighted_sum(decider: Any) -> None:
    rows = [*decode({"A": 125, "B": 100, "C": 300}), *prefill({"A": 500, "B": 900, "C": 2000})]
    selection = decide(decider(), rows, "64q1s4k*0.9,q2k*0.1")
    assert selection.evidence is not None
    assert selection.evidence.time_us == pytest.approx(0.9 * 100 + 0.1 * 500)
    assert {phase: used.share for phase, used in selection.evidence.phases.items()} == pytest.approx(
        {"decode": 0.9, "prefill": 0.1}
    )
    some = decide(decider(), decode({"A": 125, "B": 100}), "64q1s4k*0.9,q2k*0.1")
    assert some.evidence is not None
    assert some.evidence.time_us is None


def test_a_mixed_batch_counts_where_both_kernels_are_the_backends(decider: Any, spec: Any) -> None:
    both = [
        measured(name, "q512s1k_8q1s1k", time_us, kernel={"prefill": name.lower(), "decode": name.lower()})
        for name, time_us in (("A", 50), ("B", 40))
    ]
    assert decide(decider(), both, "q512s1k_8q1s1k").selected["prefill"] == "B"
    borrowed = [both[0], measured("B", "q512s1k_8q1s1k", 40, kernel={"prefill": "b", "decode": "a"})]
    assert decide(decider(), borrowed, "q512s1k_8q1s1k").selected["prefill"] == "A"


# Digests and snapshots.


def test_the_digest_names_the_measurements_that_were_used(decider: Any) -> None:
    def digest(*rows: StoredMeasurement) -> str:
        used = decide(decider(), rows).evidence
        assert used is not None
        assert used.digest is not None
        return used.digest

    rows = decode({"A": 125, "B": 113})
    assert digest(*rows) == digest(*reversed(rows))
    assert digest(*rows) == digest(*rows, measured("A", "64q1s4k", 10, kernel={"decode": "other"}))
    assert digest(*rows) != digest(*decode({"A": 125, "B": 114}))
    assert digest(*rows) != digest(rows[0])
    assert decide(decider(), rows).evidence.files == ("packaged.jsonl",)  # type: ignore[union-attr]


def test_a_batch_that_cannot_be_read_is_named(decider: Any) -> None:
    selection = decide(decider(), [*decode({"A": 125, "B": 113}), measured("C", "64x", 100)])
    assert selection.selected["decode"] == "B"
    assert any("packaged.jsonl:1: batch = '64x'" in warning for warning in selection.warnings)


# Synthetic kernels: known times, noise, and what the choice costs.


def truth(name: str, batch: int, context: int) -> float:
    """Return the time in us of a synthetic decode: a start, bytes over a bandwidth, and blocks in waves."""
    start, gigabytes, per_block = {"A": (12.0, 2600.0, 0.05), "B": (6.0, 1900.0, 0.09), "C": (20.0, 2950.0, 0.02)}[name]
    read = batch * context * 8 * 128 * 2 * 2 / gigabytes / 1e3
    return start + read + per_block * batch * 8


def noisy(seed: int, batches: Sequence[tuple[int, int]], noise: float = 0.01) -> list[StoredMeasurement]:
    draw = random.Random(seed)
    return [
        measured(name, f"{batch}q1s{context}", truth(name, batch, context) * draw.gauss(1, noise))
        for name in "ABC"
        for batch, context in batches
    ]


MEASURED = [(batch, context) for batch in (1, 4, 16, 64, 256) for context in (256, 1024, 4096, 16384)]
ASKED = [(2, 700), (3, 9000), (8, 300), (12, 2500), (32, 600), (48, 12000), (100, 500), (128, 3000), (200, 1024)]


@pytest.fixture(scope="module")
def two_files() -> tuple[list[StoredMeasurement], list[StoredMeasurement]]:
    return noisy(1, MEASURED), noisy(2, MEASURED)


def test_the_choice_costs_little_where_batches_were_not_measured(decider: Any, two_files: Any) -> None:
    made, costs = decider(), []
    evidence = known(two_files[0], made.environment)
    for batch, context in ASKED:
        workload = parse_workload(f"{batch}q1s{context}")
        selection = made.decide(LAYER, Choice(), workload=workload, evidence=evidence)
        times = {name: truth(name, batch, context) for name in "ABC"}
        costs.append(times[selection.selected["decode"] or ""] / min(times.values()))
        timing = next(c for c in selection.candidates if c.backend == "A").phases["decode"].timing
        assert timing is not None
        assert timing.measured_shapes == 0
        assert timing.time_us == pytest.approx(times["A"], rel=0.3)
    by_rule = [truth("A", *each) / min(truth(name, *each) for name in "ABC") for each in ASKED]
    assert sum(costs) / len(costs) < 1.05 < sum(by_rule) / len(by_rule)
    assert max(costs) < 1.2


def test_two_noisy_files_decide_alike_outside_ties(decider: Any, two_files: Any) -> None:
    made, chosen = decider(), []
    for rows in two_files:
        evidence = known(rows, made.environment)
        found = [
            made.decide(LAYER, Choice(), workload=parse_workload(f"{b}q1s{c}"), evidence=evidence) for b, c in MEASURED
        ]
        chosen.append([selection.selected["decode"] for selection in found])
    for (batch, context), *names in zip(MEASURED, *chosen, strict=True):
        times = [truth(name, batch, context) for name in names]
        assert names[0] == names[1] or max(times) / min(times) < 1.06, (batch, context, names)


def test_layers_without_a_cache_are_timed_in_prefill(decider: Any, spec: Any) -> None:
    encoder = LAYER.model_copy(update={"attn_type": "encoder_only"})
    specs = [spec(name, attn_types=("decoder", "encoder_only")) for name in "ABC"]
    rows = prefill({"A": 50, "B": 40}, batch="8q512", config=encoder)
    selection = decide(decider(specs=specs), rows, "8q512", config=encoder)
    assert selection.selected == {"prefill": "B"}
    assert PHASES[0] == "prefill"


def test_graphs_are_trusted_before_eager_launches(decider: Any) -> None:
    eager = decode({"A": 100, "B": 150}, method="eager")
    graph = decode({"A": 90, "B": 60})
    selection = decide(decider(), [*eager, *graph])
    assert selection.selected["decode"] == "B"
    assert decide(decider(), eager).selected["decode"] == "A"
    timing = next(c for c in selection.candidates if c.backend == "A").phases["decode"].timing
    assert timing is not None
    assert (timing.method, timing.time_us) == ("graph", 90)


def test_a_time_that_compares_with_the_winners_is_shown_first(decider: Any) -> None:
    tables = decode({"A": 100, "B": 150, "C": 160}, method="table", source="tables 1.0", rounds=0, spread_us=None)
    selection = decide(decider(), [*tables, *decode({"B": 140}, file="user")])
    shown = {c.backend: c.phases["decode"] for c in selection.candidates}
    assert shown["B"].timing is not None
    assert (shown["B"].timing.kind, shown["B"].behind) == ("table", 1.5)


@pytest.mark.parametrize(("time_us", "first"), [(94, "A"), (92, "B")])
def test_a_line_without_a_spread_has_a_margin_of_five_percent(decider: Any, time_us: float, first: str) -> None:
    rows = decode({"A": 100, "B": time_us}, method="table", source="tables 1.0", rounds=0, spread_us=None)
    assert decide(decider(), rows).selected["decode"] == first


def test_several_measurements_of_one_batch_count_by_their_median(decider: Any) -> None:
    rows = [measured("A", "64q1s4k", time_us) for time_us in (100, 300, 110)]
    timing = next(c for c in decide(decider(), rows).candidates if c.backend == "A").phases["decode"].timing
    assert timing is not None
    assert timing.time_us == 110


def test_a_device_without_figures_has_no_roofline(decider: Any) -> None:
    made = decider()
    device = Device("sm90", (9, 0), full_name="any GPU of compute capability 9.0")
    evidence = Evidence(lambda layer: Stored((), (), ()), device, made.environment, fit)
    selection = made.decide(LAYER, Choice(), workload=parse_workload("64q1s4k"), evidence=evidence)
    assert all(verdict.timing is None for c in selection.candidates for verdict in c.phases.values())


def test_no_phase_without_a_backend_is_chosen_by_times(decider: Any, spec: Any) -> None:
    specs = [spec("A", phases=("decode",)), spec("B", phases=("decode",))]
    selection = decide(decider(specs=specs), decode({"A": 140, "B": 100}))
    assert selection.selected == {"prefill": None, "decode": "B"}


def test_a_tie_goes_to_the_order_of_the_rules_not_of_the_names(decider: Any) -> None:
    rule = {"name": "packaged-prefer", "layer": 0, "prefer": ["C", "B"]}
    assert ranks(decide(decider(rule), decode({"A": 100, "B": 100, "C": 100}))) == ["C", "B", "A"]


def test_what_two_pairs_have_in_common_blurs_no_difference() -> None:
    """The decode's wide margin is the same in both pairs, whose prefills differ by far more than theirs."""

    def timing(time_us: float, margin: float) -> Timing:
        return Timing(
            time_us=time_us,
            margin=margin,
            share=0.5,
            kind="measured here",
            source="measured",
            method=None,
            measured_shapes=1,
            shapes=1,
            kernel={},
            libraries={},
        )

    rivals: dict[Phase, dict[str, Timing]] = {
        "prefill": {"SLOW": timing(120.0, 0.01), "QUICK": timing(100.0, 0.01)},
        "decode": {"SLOW": timing(1000.0, 0.5)},
    }
    found = fastest({"prefill": "SLOW", "decode": "SLOW"}, rivals, lambda pair: True)
    assert found == {"prefill": "SLOW", "decode": "SLOW"}  # 20 of 1100 us are less than 2 %
    rivals["prefill"]["SLOW"] = timing(200.0, 0.01)
    found = fastest({"prefill": "SLOW", "decode": "SLOW"}, rivals, lambda pair: True)
    assert found == {"prefill": "QUICK", "decode": "SLOW"}
