"""``StepChoice``: which backend runs a step, on models with known times."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.layer.config import AttentionConfig
from attn_select.times.batch_shape import BatchShape, RequestGroup, parse_batch_shape
from attn_select.times.model import Prediction
from attn_select.times.step_choice import WORTH, Names, Requests, StepChoice, by_phase, lead_of
from attn_select.times.workload import parse_workload

LAYER = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
SPECULATIVE = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, num_speculative_tokens=3)
ENCODER = AttentionConfig(num_heads=32, num_kv_heads=32, head_size=128, attn_type="encoder_only")


@dataclass
class Known:
    """A kernel whose time is a function of the batch; of prefills and decodes together ``both`` of their two times."""

    time_us: Callable[[BatchShape], float | None]
    both: Callable[[float, float], float] = operator.add
    knows_mixed: bool = True

    def predict(self, batch: BatchShape) -> Prediction | None:
        found = self.time_us(batch)
        return None if found is None else Prediction(found, 0.0)

    def together(self, prefill_us: float, decode_us: float) -> float:
        return self.both(prefill_us, decode_us)


def keys(batch: BatchShape) -> int:
    return sum(group.count * group.seq_len for group in batch.groups)


def lens(batch: BatchShape) -> tuple[list[int], list[int]]:
    """Return the query lengths and the key lengths of a batch, its decodes first."""
    each = [group for group in reversed(batch.groups) for _ in range(group.count)]
    return [group.query_len for group in each], [group.seq_len for group in each]


def ask(choice: StepChoice, batch: BatchShape | str) -> Names:
    """Return what a group is told for a batch."""
    batch = parse_batch_shape(batch) if isinstance(batch, str) else batch
    whole = batch.num_requests, batch.num_tokens, batch.max_query_len, keys(batch), batch.max_seq_len
    if batch.max_query_len <= choice.longest_decode:
        return choice(None, whole)
    return choice(*by_phase(whole, lead_of(*lens(batch)), choice.longest_decode))


SHORT = Known(lambda batch: 10 + keys(batch) / 1000)
LONG = Known(lambda batch: 50 + keys(batch) / 2000)
"""Equal at 80000 keys."""
BOTH = {"SHORT": SHORT, "LONG": LONG}


def choice_of(
    chosen: Mapping[str, str] | None = None, config: AttentionConfig = LAYER, apart: bool = False, **models: object
) -> StepChoice:
    chosen = {"prefill": "SHORT", "decode": "SHORT"} if chosen is None else chosen
    return StepChoice(config, chosen, models, apart)  # type: ignore[arg-type]


def test_decodes_go_to_the_fastest() -> None:
    choice = choice_of(decode=BOTH)
    assert ask(choice, "16q1s1k") == ("SHORT", "SHORT")
    assert ask(choice, "64q1s8k") == ("SHORT", "LONG")
    assert ask(choice, "q4k") == ask(choice, "q512_16q1s1k") == ("SHORT", "SHORT")


def counted() -> tuple[Known, list[BatchShape]]:
    """Return a kernel and the list of the batches that it is asked for."""
    asked: list[BatchShape] = []

    def time_us(batch: BatchShape) -> float:
        asked.append(batch)
        return 50 + keys(batch) / 2000

    return Known(time_us), asked


def test_prepared_steps_are_not_worked_out_again() -> None:
    long, asked = counted()
    choice, fresh = (choice_of(decode={"SHORT": SHORT, "LONG": long}) for _ in range(2))
    choice.prepare(70, 64, 8192)
    count = len(asked)
    steps = ("64q1s8k", "3q1s100", "70q1s64", "q1s2k_9q1s1k", "2q1s8k_40q1s2k", "q1s8k_69q1s64", "3q64_q1s8k_9q1s200")
    found = [ask(choice, step) for step in steps]
    assert len(asked) == count
    assert found == [ask(fresh, step) for step in steps]
    ask(choice, "71q1s8k_q1s60k")
    assert len(asked) > count + len(steps)  # beyond what was prepared


def test_prepared_prefills_are_not_worked_out_again() -> None:
    long, asked = counted()
    choice = choice_of(prefill={"SHORT": SHORT, "LONG": long})
    choice.prepare(70, 512, 8192)
    count = len(asked)
    assert count > 0
    for step in ("q2", "q512", "q100s4k", "4q128", "2q64s8k", "q300_q20", "8q64", "7q2_q400s8k"):
        ask(choice, step)
    assert len(asked) == count
    ask(choice, "q2k")
    assert len(asked) > count  # beyond what was prepared


PREPARED, ASKED = counted()
PREPARED_CHOICE = choice_of(prefill={"SHORT": SHORT, "LONG": PREPARED}, decode={"SHORT": SHORT, "LONG": PREPARED})
PREPARED_CHOICE.prepare(64, 512, 8192)
ASKED_BEFORE = len(ASKED)


@given(st.data())
def test_all_steps_within_what_is_prepared_are_known(data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        lengths = st.lists(st.tuples(st.integers(1, 32), st.integers(64, 8192)), min_size=1, max_size=6)
        groups = [RequestGroup(count, 1, length) for count, length in data.draw(lengths)]
        most = 64
    else:
        queries = data.draw(st.lists(st.integers(2, 505), min_size=1, max_size=8))
        contexts = st.integers(64, 8192) if data.draw(st.booleans()) else st.just(0)
        groups = [RequestGroup(1, query, query + data.draw(contexts)) for query in queries]
        most = 8
    batch = BatchShape(tuple(groups))
    if batch.num_requests <= most and (batch.is_decode() or batch.num_tokens <= 512):
        ask(PREPARED_CHOICE, batch)
    assert len(ASKED) == ASKED_BEFORE


def test_numbers_of_equal_decodes_are_told_apart_finest() -> None:
    """A kernel that takes a step's requests in waves is told 60 of them from 64; where one is far longer than the
    others, that one counts."""
    waves = Known(lambda batch: 100.0 if batch.num_requests <= 62 else 200.0)
    choice = choice_of(decode={"SHORT": Known(lambda batch: 140.0), "WAVES": waves})
    assert [ask(choice, f"{count}q1s1k")[1] for count in (60, 64)] == ["WAVES", "SHORT"]
    assert ask(choice, "q1s16k_59q1s1k") == ask(choice, "q1s16k_63q1s1k")


def test_one_backend_that_serves_both_phases_takes_the_batch_whole() -> None:
    choice = choice_of(prefill=BOTH, decode=BOTH)
    assert ask(choice, "64q1s8k") == ("LONG", "LONG")
    assert ask(choice, "q256") == ("SHORT", "SHORT")
    assert ask(choice, "16q8k") == ("LONG", "LONG")


def test_the_first_of_equal_ones_runs() -> None:
    same = Known(lambda batch: 7.0)
    assert ask(choice_of(decode={"B": same, "C": same}), "q1s9")[1] == "B"


def test_the_chosen_one_runs_where_none_is_much_faster() -> None:
    def among(other_us: float) -> Mapping[str, Known]:
        return {"OTHER": Known(lambda _: other_us), "SHORT": Known(lambda _: 100.0)}

    near, far = among(100 / WORTH + 0.1), among(100 / WORTH - 0.1)
    for text in ("q1s9", "q64", "q64_q1s9"):
        assert ask(choice_of(prefill=near, decode=near), text) == ("SHORT", "SHORT")
        assert ask(choice_of(prefill=far, decode=far), text) == ("OTHER", "OTHER")
    shapes = parse_workload("8q1s8k").of_phase("decode", LAYER)
    assert choice_of(decode=near).captured(4, 1, shapes, [*near])[1] == "SHORT"
    assert choice_of(decode=far).captured(4, 1, shapes, [*far])[1] == "OTHER"


@pytest.mark.parametrize(("together", "expected"), [(90.0, ("P", "P")), (40.0, ("D", "D")), (61.0, ("P", "D"))])
def test_a_mixed_batch_runs_whole_or_apart_whatever_takes_less(together: float, expected: tuple[str, str]) -> None:
    """P takes 20 for prefills and 100 for decodes, D the reverse and 40; P takes 50 or 70 for both, D ``together``."""

    def times(prefill: float, decode: float, both: float) -> Known:
        return Known(lambda batch: decode if batch.is_decode() else prefill, lambda *_: both)

    models = {"P": times(20, 100, 50.0 if expected == ("P", "P") else 70.0), "D": times(100, 40, together)}
    choice = choice_of({"prefill": "P", "decode": "P"}, prefill=models, decode=models)
    assert ask(choice, "q512_16q1s1k") == expected


def test_a_mixed_batch_that_nothing_like_was_measured_of_keeps_the_chosen_backends() -> None:
    models = {"SHORT": SHORT, "LONG": Known(LONG.time_us, knows_mixed=False)}
    choice = choice_of(prefill=models, decode=models)
    assert ask(choice, "64q8k_64q1s8k") == ("SHORT", "SHORT")
    assert ask(choice, "64q1s8k") == ask(choice, "64q8k") == ("LONG", "LONG")
    assert ask(choice, "q256_64q1s8k") == ("SHORT", "LONG")  # apart each takes its own time
    models["SHORT"], models["LONG"] = Known(SHORT.time_us, knows_mixed=False), LONG
    assert ask(choice_of(prefill=models, decode=models), "64q8k_64q1s8k") == ("SHORT", "SHORT")


def test_phases_that_are_always_apart_are_chosen_apart() -> None:
    chosen = {"prefill": "SHORT", "decode": "SHORT"}
    assert ask(choice_of(chosen, apart=True, decode=BOTH), "q8k_64q1s8k") == ("SHORT", "LONG")
    assert ask(choice_of(chosen, apart=True, prefill=BOTH, decode=BOTH), "q256_63q1s8k") == ("SHORT", "LONG")
    pair = {"prefill": "OTHER", "decode": "SHORT"}
    assert ask(choice_of(pair, decode=BOTH), "q256_63q1s8k") == ("OTHER", "LONG")


@pytest.mark.parametrize("apart", [True, False])
def test_the_lengths_of_a_mixed_step_count(apart: bool) -> None:
    """One decode of 32067 keys among 186 of a service's step, beside a prompt of 1862 tokens.

    FIXED cuts every decode into as many parts as fit at once, so that the longest one takes the step's time; FAIR
    deals the keys out. Of equal decodes FIXED is the faster one.
    """
    fixed = Known(lambda batch: 60 + keys(batch) / 8000 + batch.max_seq_len / 60 if batch.is_decode() else 72.0)
    fair = Known(lambda batch: 75 + keys(batch) / 8000 if batch.is_decode() else 72.0)
    models = {"FIXED": fixed, "FAIR": fair}
    choice = choice_of({"prefill": "FIXED", "decode": "FIXED"}, apart=apart, prefill=models, decode=models)
    short = "_".join(f"{count}q1s{length}" for count, length in ((60, 300), (65, 700), (40, 1300), (20, 2400)))
    assert ask(choice, f"q1862_q1s32067_{short}")[1] == "FAIR"
    assert ask(choice, f"q1862_{short}_q1s300")[1] == "FAIR" if apart else True
    assert ask(choice, "q1862_186q1s779")[1] == "FIXED"
    assert ask(choice, "q1862s32067_185q1s600")[1] == "FIXED"  # the prompt's context is none of the decodes'


def test_what_no_model_predicts_is_not_chosen() -> None:
    models = {"SHORT": Known(lambda batch: None), "LONG": LONG}
    assert ask(choice_of(decode=models), "q1s16")[1] == "LONG"


def test_a_phase_without_times_keeps_its_backend() -> None:
    choice = choice_of({"prefill": "SHORT", "decode": "KEPT"}, apart=True, prefill=BOTH)
    assert ask(choice, "q512k_16q1s1k") == ("LONG", "KEPT")
    choice = choice_of({"prefill": "KEPT", "decode": "SHORT"}, apart=True, decode=BOTH)
    assert ask(choice, "q512_64q1s8k") == ("KEPT", "LONG")


def test_an_encoder_may_have_one_token() -> None:
    asked: list[BatchShape] = []

    def time_us(batch: BatchShape) -> float:
        asked.append(batch)
        return 1.0

    ask(choice_of({"prefill": "A"}, ENCODER, prefill={"A": Known(time_us)}), "4q1")
    assert [str(batch) for batch in asked] == ["4q1"]


def test_layers_without_a_cache_have_prefills_alone() -> None:
    choice = choice_of({"prefill": "SHORT"}, ENCODER, prefill=BOTH)
    assert ask(choice, "4q128") == ("SHORT", None)
    assert ask(choice, "64q2k") == ("LONG", None)
    assert ask(choice, "64q1") == ("SHORT", None)


def test_speculative_queries_are_decodes() -> None:
    seen: list[BatchShape] = []
    model = Known(lambda batch: seen.append(batch) or 1.0)  # type: ignore[func-returns-value]
    ask(choice_of(config=SPECULATIVE, decode={"SHORT": model}), "8q4s1k")
    ask(choice_of(config=LAYER, decode={"SHORT": model}), "8q4s1k")
    assert [str(batch) for batch in seen] == ["8q4s1k"]


@pytest.mark.parametrize(
    "text",
    [
        "q1s1",
        "64q1s4k",
        "128q1s2k",
        "q1s128k",
        "q16k",
        "4q512s2560",
        "8q1s16k",
        "2q1s32k",
        "q512s1k_64q1s2k",
        "q2k_q1s8k",
    ],
)
def test_a_batch_is_predicted_as_it_is(text: str) -> None:
    """Numbers that are powers of two lose nothing."""
    seen: list[RequestGroup] = []
    model = Known(lambda batch: seen.extend(batch.groups) or 1.0)  # type: ignore[func-returns-value]
    models = {"SHORT": model}
    ask(choice_of(prefill=models, decode=models), text)
    assert seen == [*parse_batch_shape(text).groups]


def test_prompts_of_many_lengths_are_not_taken_for_equal_ones() -> None:
    seen: list[BatchShape] = []
    model = Known(lambda batch: seen.append(batch) or 1.0)  # type: ignore[func-returns-value]
    ask(choice_of(prefill={"SHORT": model}, decode={"SHORT": model}), "q2k_7q16")
    assert seen[0].num_requests == 8
    assert seen[0].max_query_len == pytest.approx(2048, rel=0.1)
    assert seen[0].num_tokens == pytest.approx(2160, rel=0.1)


@given(st.data())
def test_prefills_and_decodes_are_told_apart_in_any_order(data: st.DataObject) -> None:
    longest = data.draw(st.integers(1, 4))
    queries = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    sequences = [query + data.draw(st.integers(0, 50)) for query in queries]

    def of(wanted: bool) -> Requests | None:
        own = [(q, s) for q, s in zip(queries, sequences, strict=True) if (q > longest) is wanted]
        q, s = [q for q, _ in own], [s for _, s in own]
        return (len(own), sum(q), max(q), sum(s), max(s)) if own else None

    whole = len(queries), sum(queries), max(queries), sum(sequences), max(sequences)
    assert by_phase(whole, lead_of(queries, sequences), longest) == (of(True), of(False))


def test_the_longest_sequence_counts() -> None:
    """A long request beside short ones is seen although requests and keys are those of equal ones."""
    uneven = Known(lambda batch: 10.0 + batch.max_seq_len / 100)
    even = Known(lambda batch: 60.0)
    choice = choice_of(decode={"SHORT": uneven, "LONG": even})
    assert ask(choice, "64q1s2k")[1] == "SHORT"
    assert ask(choice, "q1s64k_63q1s1040")[1] == "LONG"


@given(st.data())
def test_any_batch_has_an_answer_that_does_not_depend_on_those_before(data: st.DataObject) -> None:
    def draw() -> BatchShape:
        counts = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3))
        queries = [data.draw(st.integers(1, 5000)) for _ in counts]
        sequences = [query + data.draw(st.integers(0, 100000)) for query in queries]
        return BatchShape(tuple(map(RequestGroup, counts, queries, sequences)))

    batches = [draw() for _ in range(data.draw(st.integers(1, 4)))]
    one, other = (choice_of(prefill=BOTH, decode=BOTH) for _ in range(2))
    answers = {batch: ask(one, batch) for batch in batches}
    shuffled = [*batches]
    random.Random(0).shuffle(shuffled)
    assert {batch: ask(other, batch) for batch in shuffled} == answers
    assert {name for names in answers.values() for name in names} <= {*BOTH}


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_select.times.step_choice._MOST_KNOWN", 4)
    choice = choice_of(decode=BOTH)
    answers = [ask(choice, f"q1s{2**bits}") for bits in range(20)]
    assert [ask(choice, f"q1s{2**bits}") for bits in range(20)] == answers
    assert len(choice._decodes_known) <= 4


def test_a_captured_size_has_its_own_number_of_tokens() -> None:
    seen: list[BatchShape] = []

    def watched(batch: BatchShape) -> float:
        seen.append(batch)
        return 1.0

    shapes = parse_workload("8q4s8k").of_phase("decode", SPECULATIVE)
    choice_of(config=SPECULATIVE, decode={"SHORT": Known(watched)}).captured(16, 4, shapes, ["SHORT"])
    assert seen == [parse_batch_shape("16q4s8k")]


def test_a_captured_size_is_chosen_by_the_lengths_of_the_workload() -> None:
    choice = choice_of(decode=BOTH)
    shapes = parse_workload("8q1s8k*0.5,64q1s512*0.5").of_phase("decode", LAYER)
    assert choice.captured(4, 1, shapes, [*BOTH]) == ("SHORT", "SHORT")
    assert choice.captured(64, 1, shapes, [*BOTH]) == ("SHORT", "LONG")
    assert choice.captured(64, 1, shapes, ["SHORT"]) == ("SHORT", "SHORT")
    assert choice_of(prefill=BOTH).captured(64, 1, shapes, [*BOTH]) == ("SHORT", "SHORT")
