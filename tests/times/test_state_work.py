"""Bytes, FLOPs and times of layers that keep a state."""

from __future__ import annotations

import pytest

from attn_select.layer.layouts import bytes_per_slot
from attn_select.layer.state import StateConfig
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.roofline import roofline_us, step_work

GDN = StateConfig(recurrence="gated_delta_net", num_heads=2, num_v_heads=4, head_size=64, conv_kernel_size=4)
STATE = 4 * 64 * 64 * 4
WINDOW = 3 * (2 * 2 * 64 + 4 * 64) * 2
TOKEN = (2 * 2 * 64 + 4 * 64 + 4 * 64) * 2 + 4 * (4 + 4)


def test_a_decode_reads_one_state_and_writes_one() -> None:
    work = step_work(GDN, parse_batch_shape("5q1s1k"))
    assert bytes_per_slot(GDN) == STATE + WINDOW
    assert (work.kv_bytes, work.cache_write_bytes) == (5 * (STATE + WINDOW), 5 * (STATE + WINDOW))
    assert work.query_bytes == 5 * TOKEN
    assert work.flops == 5 * 4 * 64 * 64 * 7  # one product of the decay, three of multiplications and additions
    assert work == step_work(GDN, parse_batch_shape("5q1s100k"))


def test_a_new_request_reads_none() -> None:
    new, later = (step_work(GDN, parse_batch_shape(text)) for text in ("2q100", "2q100s101"))
    assert (new.kv_bytes, later.kv_bytes) == (0, 2 * (STATE + WINDOW))
    assert new.cache_write_bytes == later.cache_write_bytes == 2 * (STATE + WINDOW)


def test_decodes_with_drafts_write_a_state_for_each_token() -> None:
    drafting = GDN.model_copy(update={"num_speculative_tokens": 3})
    assert step_work(drafting, parse_batch_shape("q4s100")).cache_write_bytes == 4 * (STATE + WINDOW)
    assert step_work(drafting, parse_batch_shape("q5s100")).cache_write_bytes == STATE + WINDOW


@pytest.mark.parametrize(
    ("recurrence", "products", "gates"), [("kda", 7, 4 * 64 + 4), ("mamba2", 5, 4 + 4), ("lightning", 5, 4)]
)
def test_recurrences_differ_in_products_and_gates(recurrence: str, products: int, gates: int) -> None:
    config = StateConfig(recurrence=recurrence, num_heads=4, head_size=64)
    work = step_work(config, parse_batch_shape("q1s9"))
    assert work.flops == 4 * 64 * 64 * products
    assert work.query_bytes == 4 * 4 * 64 * 2 + 4 * gates


def test_the_roofline_of_a_decode_is_that_of_its_bytes() -> None:
    h200, batch = lookup("h200"), parse_batch_shape("64q1s1k")
    assert h200.bandwidth_gbps is not None
    assert roofline_us(GDN, batch, h200) == pytest.approx(step_work(GDN, batch).bytes / h200.bandwidth_gbps / 1e3)
