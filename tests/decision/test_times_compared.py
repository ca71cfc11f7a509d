"""Which measured times count for a candidate, and which compare with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from timed_kernels import LAYER, decide, decode, known, measured, prefill, ranks, why

from attn_select.decide.explicit import Choice
from attn_select.decide.selection import Selection
from attn_select.layer.config import PHASES
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.times.evidence import Evidence
from attn_select.times.measurement import Measurement
from attn_select.times.store import Stored, StoredMeasurement
from attn_select.times.workload import parse_workload
from attn_select_measure.fitting.fit import fit


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
