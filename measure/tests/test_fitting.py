"""The model of time, on kernels whose times are known and measured with known noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.layer.state import StateConfig
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.model import LEAST_POINTS, TimeModel
from attn_select.times.roofline import step_work
from attn_select.times.timed_layer import timed_layer
from attn_select_measure.fitting.fit import fit
from attn_select_measure.fitting.points import farthest_first
from attn_select_measure.measured_lines import measured_files, measured_lines

H100 = lookup("h100")
GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
MLA = AttentionConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
DECODES = [parse_batch_shape(f"{n}q1s{s}") for n in COUNTS for s in LENGTHS if n * s <= 2**21]
PREFILLS = [parse_batch_shape(f"{n}q{s}") for n in COUNTS for s in LENGTHS if n * s <= 2**17]

Kernel = Callable[[BatchShape], float]


def kernel(config: AttentionConfig, start: float, bandwidth: float, tflops: float, turn: float = 0.0) -> Kernel:
    """A kernel whose times are known: a start, a roofline, and a deviation that turns slowly along the lengths."""

    def time_us(batch: BatchShape) -> float:
        work = step_work(config, batch)
        roof = math.hypot(work.bytes / (bandwidth * 1e3), work.flops / (tflops * 1e6))
        return (start + roof) * math.exp(turn * math.sin(math.log2(batch.max_seq_len) / 2))

    return time_us


def measured(time_us: Kernel, batches: Sequence[BatchShape], noise: float, seed: int) -> list[tuple[BatchShape, float]]:
    """Times of the batches as a bench would find them."""
    drawn = random.Random(seed)
    return [(batch, time_us(batch) * math.exp(drawn.gauss(0, noise))) for batch in batches]


def predicted(model: TimeModel, batch: BatchShape) -> float:
    found = model.predict(batch)
    assert found is not None
    return found.time_us


def errors(model: TimeModel, time_us: Kernel, batches: Sequence[BatchShape]) -> list[float]:
    return sorted(abs(predicted(model, batch) / time_us(batch) - 1) for batch in batches)


@pytest.mark.parametrize("config", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize("batches", [DECODES, PREFILLS], ids=["decode", "prefill"])
def test_times_between_the_measured_ones(config: AttentionConfig, batches: list[BatchShape]) -> None:
    time_us = kernel(config, 8, 2500, 600, turn=0.2)
    known = farthest_first(batches, 24)
    model = fit(measured(time_us, known, 0.01, seed=1), timed_layer(config), H100)
    found = errors(model, time_us, [batch for batch in batches if batch not in known])
    assert found[len(found) // 2] < 0.03
    assert found[int(0.9 * len(found))] < 0.12


@pytest.mark.parametrize("l2_bytes", [60e6, 120e6])
def test_what_the_l2_keeps_is_found(l2_bytes: float) -> None:
    def time_us(batch: BatchShape) -> float:
        moved = step_work(GQA, batch).bytes
        return 5 + moved / 12e6 + (moved / 3e6 if moved > l2_bytes else 0)

    model = fit(measured(time_us, DECODES, 0.0, 1), timed_layer(GQA), H100)
    assert 0.7 < model.to_dict()["decode"]["l2_bytes"] / l2_bytes < 1.4


def test_the_margin_holds_what_it_says() -> None:
    time_us = kernel(GQA, 8, 2500, 600, turn=0.2)
    inside = []
    for seed in range(5):
        known = farthest_first(DECODES, 24)
        model = fit(measured(time_us, known, 0.03, seed), timed_layer(GQA), H100)
        for batch in DECODES:
            found = model.predict(batch)
            assert found is not None
            inside.append(abs(time_us(batch) / found.time_us - 1) <= found.margin)
    assert sum(inside) / len(inside) > 0.9


@pytest.mark.parametrize("known", [6, 8, 12, 24, 48])
def test_margins_of_few_measured_batches_hold_what_they_say(known: int) -> None:
    """Of the packaged times, which no curve meets as well as the few that it was fitted to."""
    layer, (path,) = timed_layer(GQA), measured_files()
    times: dict[str, list[tuple[BatchShape, float]]] = {}
    for row in measured_lines(path).measurements:
        batch = parse_batch_shape(row.measurement.batch)
        if row.measurement.config == layer.to_dict() and batch.max_query_len == 1:
            times.setdefault(row.measurement.backend, []).append((batch, row.measurement.time_us))
    draw, inside = random.Random(known), []
    for points in times.values():
        for _ in range(4):
            draw.shuffle(points)
            model = fit(points[:known], layer, lookup("h200"))
            for batch, time_us in points[known : known + 30]:
                predicted = model.predict(batch)
                assert predicted is not None
                inside.append(abs(math.log(predicted.time_us / time_us)) <= math.log1p(predicted.margin))
    assert sum(inside) > 0.9 * len(inside)


def test_far_from_all_measurements_the_margin_is_wide() -> None:
    model = fit(measured(kernel(GQA, 8, 2500, 600, turn=0.2), DECODES, 0.02, 1), timed_layer(GQA), H100)
    near, far = (model.predict(parse_batch_shape(text)) for text in ("64q1s4k", "2048q1s512k"))
    assert near is not None
    assert far is not None
    assert far.margin > 2 * near.margin


def test_a_start_is_no_shorter_than_a_kernel_can_be() -> None:
    config = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
    long = [(parse_batch_shape(f"q{1024 * i}"), 100.0 * i) for i in range(1, 9)]  # no time at all for none
    start_us = predicted(fit(long, timed_layer(config), lookup("h100")), parse_batch_shape("q2"))
    assert start_us == pytest.approx(7.0, rel=0.02)
    short = [(batch, time_us / 100) for batch, time_us in long]
    start_us = predicted(fit(short, timed_layer(config), lookup("h100")), parse_batch_shape("q2"))
    assert start_us == pytest.approx(0.7 * short[0][1], rel=0.02)


@pytest.mark.parametrize("visited", [False, True], ids=["skips", "visits"])
def test_keys_that_a_window_hides_count_where_a_kernel_visits_them(visited: bool) -> None:
    config = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, sliding_window=256)

    def time_us(batch: BatchShape) -> float:
        moved = step_work(config, batch).bytes / 2.5e6
        return 6 + moved + (0.01 * batch.max_seq_len if visited else 0.0)

    known = [parse_batch_shape(f"{n}q1s{s}") for n in (1, 4, 16, 64) for s in (512, 2048, 8192, 32768)]
    model = fit(measured(time_us, known, 0.01, 1), timed_layer(config), H100)
    assert model.decode is not None
    assert model.decode.whole is visited
    assert TimeModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    assert errors(model, time_us, [parse_batch_shape(text) for text in ("8q1s4k", "2q1s16k", "32q1s1k")])[-1] < 0.25


def test_uneven_lengths_are_the_sum_of_their_requests() -> None:
    time_us = kernel(GQA, 8, 2500, 600)
    model = fit(measured(time_us, DECODES, 0.0, 1), timed_layer(GQA), H100)
    uneven = [parse_batch_shape(text) for text in ("20q1s1k_20q1s16k", "1q1s32k_63q1s512", "5q1s300_9q1s3000_2q1s9000")]
    assert errors(model, time_us, uneven)[-1] < 0.1


def test_a_batch_with_prefills_and_decodes_takes_both_times() -> None:
    time_us = kernel(GQA, 8, 2500, 600)
    model = fit(measured(time_us, [*DECODES, *PREFILLS], 0.0, 1), timed_layer(GQA), H100)
    both = predicted(model, parse_batch_shape("2q2k_32q1s2k"))
    assert both == pytest.approx(
        predicted(model, parse_batch_shape("2q2k")) + predicted(model, parse_batch_shape("32q1s2k"))
    )
    margins = [
        found.margin
        for text in ("2q2k", "32q1s2k", "2q2k_32q1s2k")
        if (found := model.predict(parse_batch_shape(text)))
    ]
    assert min(margins[:2]) <= margins[2] <= max(margins[:2])


def test_the_margin_of_both_phases_is_that_of_batches_near_it() -> None:
    apart = kernel(GQA, 8, 2500, 600)
    drawn = random.Random(5)
    near = [
        f"{drawn.randint(1, 2)}q{drawn.randint(500, 900)}_{drawn.randint(20, 40)}q1s{drawn.randint(900, 1500)}"
        for _ in range(12)
    ]
    far = [f"4q{drawn.randint(50, 90)}_{drawn.randint(2, 4)}q1s{drawn.randint(50000, 90000)}" for _ in range(12)]
    points = measured(apart, [*DECODES, *PREFILLS], 0.0, 1)
    points += [(parse_batch_shape(text), apart(parse_batch_shape(text))) for text in near]
    points += [
        (parse_batch_shape(text), apart(parse_batch_shape(text)) * (1.4, 0.7)[i % 2]) for i, text in enumerate(far)
    ]
    model = fit(points, timed_layer(GQA), H100)
    sure, unsure = (model.predict(parse_batch_shape(text)) for text in ("q700_30q1s1200", "4q70_3q1s70000"))
    assert sure is not None
    assert unsure is not None
    assert sure.margin < 0.15 < 0.3 < unsure.margin


def test_measured_mixed_batches_say_how_far_phases_overlap() -> None:
    apart = kernel(GQA, 8, 2500, 600)
    mixed = [parse_batch_shape(f"{n}q2k_{16 * n}q1s{1024 * n}") for n in (1, 2, 4, 8)]

    def overlapped(batch: BatchShape) -> float:
        parts = [apart(BatchShape((group,))) for group in batch.groups]
        return math.hypot(*parts)

    points = [*measured(apart, [*DECODES, *PREFILLS], 0.0, 1), *measured(overlapped, mixed, 0.0, 1)]
    model = fit(points, timed_layer(GQA), H100)
    assert model.overlap == 2.0
    assert errors(model, overlapped, [parse_batch_shape("3q2k_40q1s3k")])[0] < 0.1


def test_one_launch_for_both_phases_starts_once() -> None:
    config = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
    alone = kernel(config, 10.0, 3e12, 500)
    batches = [parse_batch_shape(f"q{n}") for n in (1, 128, 256, 512, 1024, 2048, 4096)]
    batches += [parse_batch_shape(f"{n}q1s1k") for n in (1, 2, 4, 8, 16, 32, 64)]
    points = [(batch, alone(batch)) for batch in batches]
    for starts in (1, 2):
        mixed = [
            (
                parse_batch_shape(f"{a}_{b}"),
                alone(parse_batch_shape(a)) + alone(parse_batch_shape(b)) - 10 * (2 - starts),
            )
            for a, b in (("q128", "8q1s1k"), ("q512", "16q1s1k"), ("q1024", "4q1s1k"), ("q2048", "32q1s1k"))
        ]
        model = fit([*points, *mixed], timed_layer(config), lookup("h100"))
        assert (model.shared_us > 0) is (starts == 1)
        both = alone(parse_batch_shape("q256")) + alone(parse_batch_shape("2q1s1k")) - 10 * (2 - starts)
        assert predicted(model, parse_batch_shape("q256_2q1s1k")) == pytest.approx(both, rel=0.06)


def test_what_is_left_over_of_mixed_batches_is_interpolated() -> None:
    """A kernel that does not split a prefill's context where decodes run beside it."""
    alone = kernel(GQA, 8, 2500, 600)

    def together(batch: BatchShape) -> float:
        prefills, decodes = (BatchShape((group,)) for group in batch.groups)
        return alone(prefills) * math.exp(0.1 * math.log2(prefills.max_seq_len / 512)) + alone(decodes)

    shapes = [f"2q512s{s}_{n}q1s2k" for s in (512, 1024, 2048, 4096, 8192, 16384, 32768) for n in (2, 32)]
    context = [parse_batch_shape(f"2q512s{s}") for s in LENGTHS if s > 512]
    points = measured(alone, [*DECODES, *PREFILLS, *context], 0.0, 1)
    points += measured(together, [*map(parse_batch_shape, shapes)], 0.0, 1)
    model = fit(points, timed_layer(GQA), H100)
    between = [parse_batch_shape(text) for text in ("2q512s6k_8q1s2k", "2q512s12k_16q1s2k", "2q512s24k_4q1s2k")]
    assert errors(model, together, between)[-1] < 0.1
    assert errors(replace(model, mixed=None), together, between)[-1] > 0.1
    assert TimeModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_mla_prefills_with_context_take_launches_of_their_own() -> None:
    alone = kernel(MLA, 8, 2500, 600)

    def time_us(batch: BatchShape) -> float:
        return alone(batch) + 50 * (batch.max_seq_len > batch.max_query_len)

    context = [parse_batch_shape(f"{n}q{s}s{2 * s}") for n in (1, 4, 16) for s in (128, 512, 2048)]
    context += [parse_batch_shape(f"{n}q256s{s}") for n in (1, 8) for s in (512, 4096, 16384)]
    model = fit(measured(time_us, [*PREFILLS, *context], 0.0, 1), timed_layer(MLA), H100)
    asked = [parse_batch_shape(text) for text in ("2q300", "2q300s400", "6q700", "6q700s800", "q200s5k")]
    assert errors(model, time_us, asked)[-1] < 0.1


def test_a_nearly_empty_last_round_takes_longer() -> None:
    alone = kernel(GQA, 8, 2500, 600)
    slots = 4 * (H100.sm_count or 0)

    def time_us(batch: BatchShape) -> float:
        rounds = 8 * batch.num_requests / slots
        return alone(batch) + (0.03 * batch.max_seq_len * max(0.0, 1 - 2.56 * (rounds % 1)) if rounds > 1 else 0)

    counts = (4, 16, 40, 64, 67, 70, 90, 130, 134, 160, 200)
    known = [parse_batch_shape(f"{n}q1s{s}") for n in counts for s in (512, 2048, 8192)]
    model = fit(measured(time_us, known, 0.0, 1), timed_layer(GQA), H100)
    assert errors(model, time_us, [parse_batch_shape(text) for text in ("68q1s3k", "137q1s3k", "120q1s3k")])[-1] < 0.05


def test_queries_of_speculative_decoding_are_decodes() -> None:
    config = GQA.model_copy(update={"num_speculative_tokens": 3})
    time_us = kernel(config, 8, 2500, 600)
    batches = [parse_batch_shape(f"{n}q4s{s}") for n in COUNTS for s in LENGTHS if n * s <= 2**21]
    model = fit(measured(time_us, batches, 0.01, 1), timed_layer(config), H100)
    assert model.prefill is None
    assert errors(model, time_us, [parse_batch_shape("48q4s3k")])[0] < 0.05
    assert model.predict(parse_batch_shape("q5s3k")) is None


def test_more_work_takes_longer() -> None:
    model = fit(measured(kernel(GQA, 8, 2500, 600), [*DECODES, *PREFILLS], 0.01, 1), timed_layer(GQA), H100)
    for ascending in (["8q1s1k", "8q1s4k", "8q1s16k"], ["4q1s4k", "16q1s4k", "64q1s4k"], ["q1k", "q4k", "q16k"]):
        times = [predicted(model, parse_batch_shape(text)) for text in ascending]
        assert times == sorted(times)


def test_caches_that_fit_into_the_l2() -> None:
    slow = kernel(GQA, 8, 800, 600)

    def time_us(batch: BatchShape) -> float:
        return slow(batch) if step_work(GQA, batch).bytes > 96e6 else kernel(GQA, 8, 5000, 600)(batch)

    known = farthest_first(DECODES, 48)
    model = fit(measured(time_us, known, 0.01, 1), timed_layer(GQA), H100)
    found = errors(model, time_us, [batch for batch in DECODES if batch not in known])
    assert found[len(found) // 2] < 0.05


def test_choosing_by_predictions_costs_little() -> None:
    """Of two kernels that cross, the predicted faster one is within a few per cent of the faster one."""
    kernels = [kernel(GQA, 5, 1800, 600), kernel(GQA, 12, 2800, 600, turn=0.1)]
    known = farthest_first(DECODES, 24)
    models = [fit(measured(each, known, 0.02, seed), timed_layer(GQA), H100) for seed, each in enumerate(kernels)]
    regrets = []
    for batch in DECODES:
        chosen = min((0, 1), key=lambda i: predicted(models[i], batch))
        regrets.append(kernels[chosen](batch) / min(each(batch) for each in kernels))
    assert math.exp(sum(map(math.log, regrets)) / len(regrets)) < 1.01
    assert len({min((0, 1), key=lambda i: kernels[i](batch)) for batch in DECODES}) == 2


def test_two_noisy_fits_choose_alike_outside_the_margin() -> None:
    kernels = [kernel(GQA, 5, 1800, 600), kernel(GQA, 12, 2800, 600, turn=0.1)]
    known = farthest_first(DECODES, 24)
    first, second = (
        [fit(measured(each, known, 0.02, 10 * turn + i), timed_layer(GQA), H100) for i, each in enumerate(kernels)]
        for turn in (1, 2)
    )
    for batch in DECODES:
        times = [model.predict(batch) for model in first]
        assert times[0] is not None
        assert times[1] is not None
        margin = math.hypot(times[0].margin, times[1].margin)
        if abs(math.log(times[0].time_us / times[1].time_us)) > margin:
            again = [predicted(model, batch) for model in second]
            assert (times[0].time_us < times[1].time_us) == (again[0] < again[1])


def test_a_model_goes_through_a_file() -> None:
    mixed = [parse_batch_shape(text) for text in ("q512s8k_32q1s2k", "q2k_8q1s1k", "4q128_64q1s4k", "q1k_q1s64k")]
    model = fit(measured(kernel(MLA, 8, 2500, 600), [*DECODES, *PREFILLS, *mixed], 0.02, 1), timed_layer(MLA), H100)
    assert (max(model.mixed_errors) > 0, model.overlap > 1, model.knows_mixed) == (True, True, True)
    model = replace(model, shared_us=3.0)
    again = TimeModel.from_dict(json.loads(json.dumps(model.to_dict())))
    assert again == model
    batch = parse_batch_shape("2q512s8k_32q1s2k")
    assert again.predict(batch) == model.predict(batch)


def test_a_phase_with_too_few_batches_has_no_prediction() -> None:
    time_us = kernel(GQA, 8, 2500, 600)
    points = measured(time_us, DECODES[: LEAST_POINTS - 1], 0.0, 1)
    assert fit(points, timed_layer(GQA), H100).predict(DECODES[0]) is None
    enough = fit(measured(time_us, DECODES[:LEAST_POINTS], 0.0, 1), timed_layer(GQA), H100)
    assert enough.predict(DECODES[0]) is not None
    assert enough.predict(PREFILLS[0]) is None
    assert enough.predict(parse_batch_shape("2q512s8k_32q1s2k")) is None
    mixed = measured(time_us, [parse_batch_shape(f"q{512 * n}_32q1s2k") for n in (1, 2, 3)], 0.0, 1)
    prefills = measured(time_us, PREFILLS[:LEAST_POINTS], 0.0, 1)
    assert fit([*prefills, *mixed], timed_layer(GQA), H100).predict(PREFILLS[0]) is not None


def test_a_batch_that_was_measured_often_counts_once() -> None:
    points = measured(kernel(GQA, 8, 2500, 600), DECODES, 0.01, 1)
    often = [*points, *[(points[0][0], points[0][1] * factor) for factor in (0.5, 1.0, 2.0)]]
    assert fit(often, timed_layer(GQA), H100) == fit(points, timed_layer(GQA), H100)


@pytest.mark.parametrize("time_us", [0.0, -1.0, math.inf, math.nan])
def test_times_that_cannot_be(time_us: float) -> None:
    with pytest.raises(ValueError, match="64q1s4k: expected a positive number"):
        fit([(parse_batch_shape("64q1s4k"), time_us)], timed_layer(GQA), H100)


def test_of_many_batches_those_near_each_other_count_as_one() -> None:
    """Else each makes every prediction slower."""
    drawn, time_us = random.Random(3), kernel(GQA, 8, 2500, 600, turn=0.2)

    def of_many(most_doublings: int) -> TimeModel:
        exponents = [(drawn.uniform(0, most_doublings), drawn.uniform(7, 7 + most_doublings)) for _ in range(400)]
        many = [parse_batch_shape(f"{2**count:.0f}q1s{2**length:.0f}") for count, length in exponents]
        return fit(measured(time_us, many, 0.02, 1), timed_layer(GQA), H100)

    model, narrow = of_many(8), of_many(3)
    assert model.decode is not None
    assert narrow.decode is not None
    assert 64 < len(model.decode.deviations.points) < 200
    assert len(narrow.decode.deviations.points) == 64
    known = [batch for batch in DECODES if batch.max_seq_len <= 2**15]
    found = errors(model, time_us, known)
    assert found[len(found) // 2] < 0.02
    assert found[int(0.9 * len(found))] < 0.05
    predictions = [(batch, each) for batch in known if (each := model.predict(batch))]
    within = [abs(math.log(each.time_us / time_us(batch))) < each.margin for batch, each in predictions]
    assert sum(within) > 0.9 * len(known)
    assert 0.02 < sum(each.margin for _, each in predictions) / len(known) < 0.15


@pytest.mark.parametrize("count", [LEAST_POINTS, 100])
def test_batches_that_differ_only_behind_the_window_count_as_one(count: int) -> None:
    config = GQA.model_copy(update={"sliding_window": 128})
    batches = [parse_batch_shape(f"16q1s{1000 + 100 * i}") for i in range(count)]
    time_us = kernel(config, 8, 2500, 600)
    model = fit(measured(time_us, batches, 0.02, 1), timed_layer(config), H100)
    assert predicted(model, parse_batch_shape("16q1s20000")) == pytest.approx(time_us(batches[0]), rel=0.03)


def test_farthest_first_keeps_away_from_what_is_there() -> None:
    there = farthest_first(DECODES, 4)
    further = farthest_first([batch for batch in DECODES if batch not in there], 4, there)
    assert set(further) == set(farthest_first(DECODES, 8)) - set(there)
    assert farthest_first(DECODES[:3], 10) != DECODES[:0]
    assert len(farthest_first(DECODES[:3], 10)) == 3


def test_farthest_first_takes_what_is_near_too_and_nothing_twice() -> None:
    near = [parse_batch_shape(f"8q1s{length}") for length in (1000, 1001, 1002)]
    assert {*farthest_first(near, 3)} == {*near}
    assert farthest_first(near[:1], 2) == near[:1]
    assert len(farthest_first([*near, *near], 6)) == 3


def test_states_are_predicted_by_requests_and_new_tokens() -> None:
    config = StateConfig(recurrence="gated_delta_net", num_heads=16, num_v_heads=32, head_size=128, conv_kernel_size=4)
    time_us = kernel(config, 6, 3000, 200)
    decodes = [parse_batch_shape(f"{n}q1s100") for n in (1, 4, 16, 64, 256)]
    prefills = [parse_batch_shape(f"{n}q{s}") for n in (1, 4, 16) for s in (128, 512, 2048)]
    model = fit(
        measured(time_us, [*decodes, *prefills, *map(parse_batch_shape, ("8q1s9", "2q1s9"))], 0.0, 1),
        timed_layer(config),
        H100,
    )
    again = TimeModel.from_dict(json.loads(json.dumps(model.to_dict())))
    unseen = [parse_batch_shape(text) for text in ("32q1s5k", "100q1s7", "3q1s80", "2q1k", "8q300s900")]
    assert errors(model, time_us, unseen)[-1] < 0.06
    assert errors(again, time_us, unseen) == errors(model, time_us, unseen)
