"""``StepChoice``: which backend runs a step, on models with known times."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.config import AttentionConfig
from attn_select.times.batch_shape import BatchShape, parse_batch_shape
from attn_select.times.dispatch import StepChoice
from attn_select.times.model import Prediction
from attn_select.times.workload import parse_workload

LAYER = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
SPECULATIVE = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, num_speculative_tokens=3)
ENCODER = AttentionConfig(num_heads=32, num_kv_heads=32, head_size=128, attn_type="encoder_only")


@dataclass
class Known:
    """A kernel whose time is a function of the batch."""

    time_us: Callable[[BatchShape], float | None]

    def predict(self, batch: BatchShape) -> Prediction | None:
        found = self.time_us(batch)
        return None if found is None else Prediction(found, 0.0)


def keys(batch: BatchShape) -> int:
    return sum(group.count * group.seq_len for group in batch.groups)


def numbers(text: str) -> tuple[int, int, int, int, int]:
    """Return what a group passes of a batch."""
    batch = parse_batch_shape(text)
    return batch.num_requests, batch.num_tokens, batch.max_query_len, keys(batch), batch.max_seq_len


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
    assert choice(*numbers("16q1s1k")) == ("SHORT", "SHORT")
    assert choice(*numbers("64q1s8k")) == ("SHORT", "LONG")
    assert choice(*numbers("q4k")) == choice(*numbers("q512_16q1s1k")) == ("SHORT", "SHORT")


def test_prepared_steps_are_not_worked_out_again() -> None:
    asked: list[BatchShape] = []

    def time_us(batch: BatchShape) -> float:
        asked.append(batch)
        return 50 + keys(batch) / 2000

    choice, fresh = (choice_of(decode={"SHORT": SHORT, "LONG": Known(time_us)}) for _ in range(2))
    choice.prepare(70, 8192)
    count = len(asked)
    steps = [numbers(text) for text in ("64q1s8k", "3q1s100", "70q1s64", "q1s2k_9q1s1k", "2q1s8k_40q1s2k")]
    found = [choice(*step) for step in steps]
    assert len(asked) == count
    assert found == [fresh(*step) for step in steps]
    choice(*numbers("71q1s8k_q1s60k"))
    assert len(asked) > count + len(steps)  # beyond what was prepared


def test_one_backend_that_serves_both_phases_takes_the_batch_whole() -> None:
    choice = choice_of(prefill=BOTH, decode=BOTH)
    assert choice(*numbers("64q1s8k")) == ("LONG", "LONG")
    assert choice(*numbers("q256")) == ("SHORT", "SHORT")
    assert choice(*numbers("16q8k")) == ("LONG", "LONG")


def test_the_first_of_equal_ones_runs() -> None:
    same = Known(lambda batch: 7.0)
    assert choice_of(decode={"B": same, "SHORT": same})(1, 1, 1, 9, 9)[1] == "B"


@pytest.mark.parametrize(("together", "expected"), [(90.0, ("P", "P")), (40.0, ("D", "D")), (61.0, ("P", "D"))])
def test_a_mixed_batch_runs_whole_or_apart_whatever_takes_less(together: float, expected: tuple[str, str]) -> None:
    """P takes 20 for prefills and 100 for decodes, D the reverse and 40; P takes 50 for both, D ``together``."""

    def times(prefill: float, decode: float, both: float) -> Known:
        def time_us(batch: BatchShape) -> float:
            found = {group.query_len > 1 for group in batch.groups}
            return both if len(found) == 2 else prefill if True in found else decode

        return Known(time_us)

    both = 50.0 if expected == ("P", "P") else 70.0
    models = {"P": times(20, 100, both), "D": times(100, 40, together)}
    choice = choice_of({"prefill": "P", "decode": "P"}, prefill=models, decode=models)
    assert choice(*numbers("q512_16q1s1k")) == expected


def test_phases_that_are_always_apart_are_chosen_apart() -> None:
    chosen = {"prefill": "SHORT", "decode": "SHORT"}
    assert choice_of(chosen, apart=True, decode=BOTH)(*numbers("q8k_64q1s8k")) == ("SHORT", "LONG")
    assert choice_of(chosen, apart=True, prefill=BOTH, decode=BOTH)(*numbers("q256_63q1s8k")) == ("SHORT", "LONG")
    pair = {"prefill": "OTHER", "decode": "SHORT"}
    assert choice_of(pair, decode=BOTH)(*numbers("q256_63q1s8k")) == ("OTHER", "LONG")


def test_what_no_model_predicts_is_not_chosen() -> None:
    models = {"SHORT": Known(lambda batch: None), "LONG": LONG}
    assert choice_of(decode=models)(*numbers("q1s16"))[1] == "LONG"


def test_layers_without_a_cache_have_prefills_alone() -> None:
    choice = choice_of({"prefill": "SHORT"}, ENCODER, prefill=BOTH)
    assert choice(*numbers("4q128")) == ("SHORT", None)
    assert choice(*numbers("64q2k")) == ("LONG", None)
    assert choice(*numbers("64q1")) == ("SHORT", None)


def test_speculative_queries_are_decodes() -> None:
    seen: list[BatchShape] = []
    model = Known(lambda batch: seen.append(batch) or 1.0)  # type: ignore[func-returns-value]
    choice_of(config=SPECULATIVE, decode={"SHORT": model})(*numbers("8q4s1k"))
    choice_of(config=LAYER, decode={"SHORT": model})(*numbers("8q4s1k"))
    assert [str(batch) for batch in seen] == ["8q4s1k"]


@pytest.mark.parametrize(
    "text", ["q1s1", "64q1s4k", "128q1s2k", "q1s128k", "q16k", "4q512s4k", "8q1s16k", "2q1s32k", "q512s1k_63q1s1k"]
)
def test_a_batch_is_predicted_as_it_is(text: str) -> None:
    """Numbers that are powers of two lose nothing; of mixed batches a mean context is known."""
    seen: list[BatchShape] = []
    model = Known(lambda batch: seen.append(batch) or 1.0)  # type: ignore[func-returns-value]
    models = {"SHORT": model}
    choice_of(prefill=models, decode=models)(*numbers(text))
    wanted = parse_batch_shape(text)
    assert keys(seen[0]) == pytest.approx(keys(wanted), rel=0.1)
    assert seen[0].max_query_len == wanted.max_query_len
    if len(wanted.groups) == 1:
        assert seen[0] == wanted


def test_the_longest_sequence_counts() -> None:
    """A long request beside short ones is seen although requests and keys are those of equal ones."""
    uneven = Known(lambda batch: 10.0 + batch.max_seq_len / 100)
    even = Known(lambda batch: 60.0)
    choice = choice_of(decode={"SHORT": uneven, "LONG": even})
    assert choice(*numbers("64q1s2k"))[1] == "SHORT"
    assert choice(64, 64, 1, 64 * 2048, 65536)[1] == "LONG"


@given(st.data())
def test_any_batch_has_an_answer_that_does_not_depend_on_those_before(data: st.DataObject) -> None:
    def draw() -> tuple[int, int, int, int, int]:
        requests = data.draw(st.integers(1, 512))
        lens = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=3))
        queries = (lens * requests)[:requests]
        sequences = [query + data.draw(st.integers(0, 100000)) for query in queries[:3]]
        sequences = (sequences * requests)[:requests]
        return requests, sum(queries), max(queries), sum(sequences), max(sequences)

    batches = [draw() for _ in range(data.draw(st.integers(1, 4)))]
    one, other = (choice_of(prefill=BOTH, decode=BOTH) for _ in range(2))
    answers = {batch: one(*batch) for batch in batches}
    shuffled = [*batches]
    random.Random(0).shuffle(shuffled)
    assert {batch: other(*batch) for batch in shuffled} == answers
    assert {name for names in answers.values() for name in names} <= {*BOTH}


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_select.times.dispatch._MOST_KNOWN", 4)
    choice = choice_of(decode=BOTH)
    answers = [choice(1, 1, 1, 2**bits, 2**bits) for bits in range(20)]
    assert [choice(1, 1, 1, 2**bits, 2**bits) for bits in range(20)] == answers
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
