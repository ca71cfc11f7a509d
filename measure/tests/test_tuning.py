"""Tuning on synthetic kernels with known times: what is measured, which regions come out, and what noise changes."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import BatchShape, RequestGroup, parse_batch_shape
from attn_select_measure.regions import Region, find_regions, next_batch, order_in
from attn_select_measure.tuning import ENOUGH_KNOWN, FIRST, HELD_OUT, TIE, Domain, Tuning

H100 = lookup("h100")
CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
DECODE = Domain(batch=(1, 256), query_len=(1, 1), seq_len=(128, 65536))
UNEVEN = Domain(batch=(1, 256), query_len=(1, 1), seq_len=(128, 65536), uneven=True)
PREFILL = Domain(batch=(1, 16), query_len=(128, 8192), seq_len=(128, 65536))
Kernel = Callable[[BatchShape], float]


def kernel(start: float, per_token: float, per_request: float, per_pair: float = 0.0, serial: float = 0.0) -> Kernel:
    """A kernel whose time grows with the tokens that it reads, with the requests and with the pairs that it computes,
    and is never below that of the longest request alone."""

    def time_us(batch: BatchShape) -> float:
        work = math.hypot(batch.num_kv_tokens * per_token, batch.num_pairs * per_pair if per_pair else 0.0)
        return start + max(work, batch.max_seq_len * serial) + batch.num_requests * per_request

    return time_us


KERNELS = {
    "A": kernel(6.0, 1.3e-3, 0.05, 6e-6),
    "B": kernel(9.0, 1.1e-3, 0.02, 8e-6),
    "C": kernel(16.0, 1.0e-3, 0.01, 5e-6),
}


def tuned(domain: Domain, points: int, noise: float, seed: int, kernels: Mapping[str, Kernel] = KERNELS) -> Tuning:
    """Return a tuning that measured ``points`` batches with a relative error of ``noise``."""
    draw = random.Random(seed)
    phase = "decode" if domain.query_len == (1, 1) else "prefill"
    tuning = Tuning(CONFIG, phase, H100, domain, [*kernels])
    while len(tuning.samples) < points and (batch := next_batch(tuning)) is not None:
        tuning.add(batch, {name: k(batch) * math.exp(draw.gauss(0, noise)) for name, k in kernels.items()})
    return tuning


def drawn(domain: Domain, count: int, seed: int) -> list[BatchShape]:
    draw = random.Random(seed)
    found: list[BatchShape] = []
    while len(found) < count:
        at = {n: round(math.exp(draw.uniform(math.log(a), math.log(b)))) for n, (a, b) in domain.axes.items()}
        batch = domain.batch_at(**at)
        if batch is not None:
            found.append(batch)
    return found


def regrets(regions: list[Region], batches: list[BatchShape]) -> list[float]:
    found = []
    for batch in batches:
        times = {name: k(batch) for name, k in KERNELS.items()}
        found.append(times[order_in(regions, batch)[0]] / min(times.values()))
    return found


@pytest.mark.parametrize("domain", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_few_regions_choose_nearly_the_best_everywhere(domain: Domain) -> None:
    regions = find_regions(tuned(domain, 40, 0.01, seed=1))
    found = regrets(regions, drawn(domain, 500, seed=2))
    assert statistics.geometric_mean(found) < 1.005
    assert sorted(found)[int(0.99 * len(found))] < 1.05
    assert 1 < len(regions) <= 7
    for region in regions[1:]:
        assert region.sample is not None
        assert region.holds(region.sample)
        assert region.times[region.against or ""] > (1 + TIE) * region.times[region.order[0]]


@pytest.mark.parametrize("seed", range(4))
def test_no_region_loses_over_the_batches_that_were_measured_in_it(seed: int) -> None:
    tuning = tuned(DECODE, 30, 0.05, seed)
    regions = find_regions(tuning)
    for number, region in enumerate(regions[1:], 1):
        held = {batch: times for batch, times in tuning.fitted.items() if region.holds(batch)}
        before = [times[order_in(regions[:number], batch)[0]] for batch, times in held.items()]
        now = [times[region.order[0]] for times in held.values()]
        assert statistics.geometric_mean(now) < statistics.geometric_mean(before)


def agreement(domain: Domain, one: list[Region], two: list[Region]) -> float:
    """The share of batches outside ties for which two tunings choose the same."""
    clear = []
    for batch in drawn(domain, 1000, seed=3):
        best, second, *_ = sorted(k(batch) for k in KERNELS.values())
        if second / best > 1 + TIE:
            clear.append(batch)
    assert len(clear) > 500
    return sum(order_in(one, batch)[0] == order_in(two, batch)[0] for batch in clear) / len(clear)


@pytest.mark.parametrize("domain", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_a_second_tuning_decides_the_same_outside_ties(domain: Domain) -> None:
    first = find_regions(tuned(domain, 30, 0.01, seed=11))
    second = find_regions(tuned(domain, 30, 0.01, seed=12), present=first)
    assert agreement(domain, first, second) >= 0.99


def test_two_tunings_that_know_nothing_of_each_other_decide_the_same() -> None:
    one, two = (find_regions(tuned(DECODE, 36, 0.005, seed)) for seed in (11, 12))
    assert agreement(DECODE, one, two) >= 0.99


def test_backends_that_are_alike_keep_their_order() -> None:
    alike = {"A": KERNELS["B"], "B": KERNELS["B"], "C": kernel(90.0, 9e-3, 0.1)}
    (region,) = find_regions(tuned(DECODE, 30, 0.003, seed=5, kernels=alike))
    assert region.order == ["A", "B", "C"]
    assert region.bounds == {}


def test_who_is_best_in_the_mean_does_not_lead_where_one_batch_costs_much() -> None:
    """Without a workload the order has to serve any batch: one that is three times too slow somewhere is no default."""
    kernels = {
        "STEADY": kernel(6.0, 1.4e-3, 0.02),
        "SERIAL": kernel(6.0, 1.0e-3, 0.02, serial=4e-3),  # a few long requests among many keep one block busy
    }
    (first, *_) = find_regions(tuned(UNEVEN, 50, 0.002, seed=3, kernels=kernels))
    assert (first.order, first.bounds) == (["STEADY", "SERIAL"], {})


def test_of_two_that_are_never_far_behind_the_better_one_in_the_mean_leads() -> None:
    kernels = {"SLOWER": kernel(9.0, 1.2e-3, 0.03), "FASTER": kernel(9.0, 1.0e-3, 0.03)}
    (first, *_) = find_regions(tuned(UNEVEN, 50, 0.002, seed=3, kernels=kernels))
    assert first.order == ["FASTER", "SLOWER"]


def test_a_batch_at_which_all_failed_says_nothing_about_the_order() -> None:
    kernels = {"SLOWER": kernel(9.0, 1.2e-3, 0.03), "FASTER": kernel(9.0, 1.0e-3, 0.03)}
    tuning = tuned(UNEVEN, 50, 0.002, seed=3, kernels=kernels)
    next(iter(tuning.fitted.values())).clear()
    assert find_regions(tuning)[0].order == ["FASTER", "SLOWER"]


def test_whose_time_on_uneven_batches_nobody_knows_does_not_lead() -> None:
    kernels = {"KNOWN": kernel(9.0, 1.3e-3, 0.03), "EVEN": kernel(6.0, 1.0e-3, 0.02)}
    tuning = tuned(UNEVEN, 50, 0.002, seed=3, kernels=kernels)
    assert find_regions(tuning)[0].order == ["EVEN", "KNOWN"]
    for batch, times in tuning.samples.items():
        if len(batch.groups) > 1:
            times.pop("EVEN", None)
    assert tuning.unknown_uneven() == ["EVEN"]
    assert find_regions(tuning)[0].order == ["KNOWN", "EVEN"]


def test_uneven_batches_get_rules_of_their_own() -> None:
    kernels = {"WHOLE": kernel(6.0, 1.0e-3, 0.02, serial=6e-3), "SPLIT": kernel(9.0, 1.15e-3, 0.05)}
    tuning = tuned(UNEVEN, 50, 0.01, seed=1, kernels=kernels)
    assert any(len(batch.groups) > 1 for batch in tuning.held_out)
    regions = find_regions(tuning)
    assert any("effective_batch" in region.bounds for region in regions)
    draw = random.Random(9)
    found: dict[bool, list[float]] = {True: [], False: []}
    for even in drawn(UNEVEN, 400, seed=5):
        (group,) = even.groups
        batch = even
        if draw.random() < 0.5 and group.count >= 4:
            long = draw.randint(1, max(1, group.count // 4))
            batch = UNEVEN.uneven_at(group.count, 1, group.seq_len, long, group.seq_len // 20) or even
        times = {name: k(batch) for name, k in kernels.items()}
        found[batch is even].append(times[order_in(regions, batch)[0]] / min(times.values()))
    for regret in found.values():
        assert len(regret) > 100
        assert statistics.geometric_mean(regret) < 1.03


def test_batches_between_powers_of_two_are_measured_too() -> None:
    batches = [*tuned(DECODE, 18, 0.0, seed=1).fitted]
    odd = [batch for batch in batches if batch.num_kv_tokens & (batch.num_kv_tokens - 1)]
    assert 3 <= len(odd) < len(batches)


def test_half_of_the_first_batches_lie_on_the_grid() -> None:
    grid = set(DECODE.cells(1))
    first = list(tuned(DECODE, FIRST, 0.0, seed=1).samples)
    assert [batch in grid for batch in first] == [True] * (FIRST // 2) + [False] * (FIRST - FIRST // 2)


def test_held_out_batches_teach_nothing() -> None:
    tuning = tuned(DECODE, 30, 0.0, seed=1)
    assert len(tuning.held_out) == HELD_OUT
    assert set(tuning.held_out) <= set(tuning.samples)
    assert not set(tuning.held_out) & set(tuning.fitted)
    before = find_regions(tuning)
    for batch in tuning.held_out:
        tuning.samples[batch] = {"A": 1e6, "B": 1.0, "C": 1e6}
    assert find_regions(tuning) == before
    assert tuned(DECODE, 1, 0.0, seed=2).held_out == tuning.held_out


def known_before(count: int) -> Tuning:
    """A tuning that knew ``count`` drawn batches."""
    tuning = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS])
    batches = [batch for batch in dict.fromkeys(drawn(DECODE, 2 * count, seed=6)) if batch not in tuning.held_out]
    for batch in batches[:count]:
        tuning.add(batch, {name: k(batch) for name, k in KERNELS.items()})
    return tuning


def test_where_many_batches_are_known_some_of_them_judge() -> None:
    tuning = known_before(ENOUGH_KNOWN)
    tuning.hold_out_known()
    assert len(tuning.held_out) == HELD_OUT
    assert {*tuning.held_out} <= {*tuning.samples}
    assert not {*tuning.held_out} & {*tuning.fitted}
    kept = tuning.held_out
    while (batch := tuning.due()) is not None:
        tuning.add(batch, {name: k(batch) for name, k in KERNELS.items()})
        tuning.hold_out_known()
    assert tuning.held_out == kept
    more = known_before(80)
    more.hold_out_known()
    assert len(more.held_out) == 10


def test_where_few_batches_are_known_new_ones_judge() -> None:
    tuning = known_before(ENOUGH_KNOWN - 1)
    before = tuning.held_out
    tuning.hold_out_known()
    assert tuning.held_out == before
    for batch in before:
        tuning.add(batch, {name: k(batch) for name, k in KERNELS.items()})
    tuning.hold_out_known()
    assert tuning.held_out == before


def test_a_region_counts_the_batches_in_which_it_is_right() -> None:
    tuning = tuned(DECODE, 40, 0.01, seed=1)
    regions = find_regions(tuning)
    assert sum(region.decided for region in regions) == len(tuning.fitted)
    assert all(region.right <= region.decided for region in regions)
    assert sum(region.right for region in regions) > 0.8 * len(tuning.fitted)


def test_a_disturbed_time_is_measured_again() -> None:
    tuning = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS])
    asked = []
    while (batch := next_batch(tuning)) is not None and len(asked) < 40:
        times = {name: k(batch) for name, k in KERNELS.items()}
        if len(asked) == 3:
            times["B"] *= 8  # something else ran
        asked.append(batch)
        tuning.add(batch, times)
    assert asked.count(asked[3]) == 2
    assert tuning.samples[asked[3]]["B"] == KERNELS["B"](asked[3])
    assert max(regrets(find_regions(tuning), drawn(DECODE, 300, seed=4))) < 1.1


def test_a_backend_without_times_is_never_chosen() -> None:
    tuning = Tuning(CONFIG, "decode", H100, DECODE, ["A", "B"])
    for _ in range(25):
        batch = next_batch(tuning)
        if batch is None:
            break
        tuning.add(batch, {"B": KERNELS["B"](batch)})
    assert [region.order for region in find_regions(tuning)] == [["B"]]
    assert find_regions(Tuning(CONFIG, "decode", H100, DECODE, ["A", "B"])) == []


def test_few_batches_are_all_measured() -> None:
    tuning = Tuning(CONFIG, "decode", H100, Domain((4, 4), (1, 1), (1024, 2048)), ["A", "B"])
    while (batch := next_batch(tuning)) is not None:
        tuning.add(batch, {"A": 2.0, "B": 1.0})
    assert {"4q1s1k", "4q1s2k"} <= {str(batch) for batch in tuning.samples}
    assert find_regions(tuning)[0].order == ["B", "A"]


def test_a_domain_leaves_out_what_no_request_has_or_what_does_not_fit() -> None:
    small = Domain((1, 4), (128, 1024), (128, 1024), fits=lambda batch: batch.num_tokens <= 1024)
    for batch in small.cells(2):
        (group,) = batch.groups
        assert group.query_len <= group.seq_len
        assert batch.num_tokens <= 1024
        assert small.holds(batch)
    assert not small.holds(parse_batch_shape("8q128"))
    assert not small.holds(parse_batch_shape("q128_q256"))
    encoder = Domain((1, 4), (128, 1024), None)
    assert all(batch.groups[0].query_len == batch.groups[0].seq_len for batch in encoder.cells(1))


def test_what_lies_near_known_batches_is_not_measured_first() -> None:
    fresh = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS])
    first = fresh.due()
    assert first is not None
    tuning = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS])
    (group,) = first.groups
    near = BatchShape((RequestGroup(group.count, 1, group.seq_len * 5 // 4 if group.seq_len < 40000 else 40000),))
    assert near != first
    tuning.add(near, {name: kernel(near) for name, kernel in KERNELS.items()})
    asked = []
    while (batch := tuning.due()) is not None:
        asked.append(batch)
        tuning.add(batch, {name: kernel(batch) for name, kernel in KERNELS.items()})
    assert first not in asked
    assert set(tuning.held_out) <= set(asked)


def test_a_batch_twice_as_long_is_not_near() -> None:
    fresh = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS])
    first = fresh.due()
    assert first is not None
    (group,) = first.groups
    other = BatchShape((replace(group, seq_len=group.seq_len * 2 if group.seq_len < 32768 else group.seq_len // 2),))
    fresh.add(other, {name: kernel(other) for name, kernel in KERNELS.items()})
    assert fresh.due() == first


def missing_measured(known: Mapping[str, Kernel], batches: list[BatchShape], points: int) -> tuple[Tuning, int]:
    """Return a tuning of all ``KERNELS`` that knew the times of ``known`` at some batches, and how many times it
    measured since then: of each batch that it asked for what was missing there."""
    tuning = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS])
    for batch in batches:
        tuning.add(batch, {name: time_us(batch) for name, time_us in known.items()}, [*known])
    count = 0
    for _ in range(points):
        batch = next_batch(tuning)
        if batch is None:
            break
        asked = tuning.missing(batch) or [*KERNELS]
        count += len(asked)
        tuning.add(batch, {name: KERNELS[name](batch) for name in asked}, asked)
    return tuning, count


def test_of_known_batches_what_is_missing_is_measured() -> None:
    before = [*tuned(DECODE, 30, 0.0, seed=1).samples]
    two = {name: KERNELS[name] for name in ("A", "B")}
    tuning, count = missing_measured(two, before, 20)
    assert {*before} & {batch for batch in tuning.samples if not tuning.missing(batch)} >= {*tuning.held_out}
    assert sum(not tuning.missing(batch) for batch in before) >= FIRST + HELD_OUT - 2
    assert count < 35  # at most 20 batches, of hardly any all three
    assert max(regrets(find_regions(tuning), drawn(DECODE, 300, seed=4))) < 1.1
    tuning, count = missing_measured(KERNELS, before, 1)
    assert len(tuning.samples) == len(before) + (count > 0)  # none, or one that nobody tried: rounding decides


def test_near_a_batch_that_some_were_tried_on_that_one_is_completed() -> None:
    first = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS]).due()
    assert first is not None
    (group,) = first.groups
    near, nearer = (BatchShape((replace(group, seq_len=round(group.seq_len * by)),)) for by in (1.8, 1.2))
    tuning = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS])
    for batch in (near, nearer):
        tuning.add(batch, {"A": 1.0}, ["A", "B"])  # B failed
    assert tuning.missing(near) == ["C"]
    assert tuning.due() == nearer
    tuning.add(nearer, {}, ["C"])
    assert tuning.missing(nearer) == []
    assert tuning.due() not in (first, near, nearer)
    tuning.forget(nearer)
    assert tuning.due() == near
    tuning.add(first, {"A": 1.0}, ["A"])
    assert tuning.due() == first


def test_a_backend_that_is_left_out_is_neither_known_nor_missing() -> None:
    batch = DECODE.cells(1)[0]
    tuning = Tuning(CONFIG, "decode", H100, DECODE, [*KERNELS])
    tuning.add(batch, {"A": 1.0, "B": 2.0}, ["A", "B"])
    tuning.leave_out("B")
    tuning.leave_out("C")
    assert tuning.samples[batch] == {"A": 1.0}
    assert tuning.missing(batch) == []
