"""Layer kinds that share a cache pool get one KV layout and one block size."""

from __future__ import annotations

from typing import Any

from attn_select.config import AttentionConfig
from attn_select.decide import Choice
from attn_select.pool import share_pool
from attn_select.spec import HeadSizes

FULL = AttentionConfig(num_heads=8, head_size=64)
WINDOW = AttentionConfig(num_heads=8, head_size=64, sliding_window=128)
RULES = [{"name": "order", "priority": ["A", "B", "C"]}]
TWO = [{"name": "order", "priority": ["A", "B"]}]


def decide(decider: Any, *configs: AttentionConfig) -> Any:
    return share_pool([decider.decide(c, Choice()) for c in configs], decider, Choice())


def test_kinds_that_already_agree_stay_as_they_are(make_spec: Any, make_decider: Any) -> None:
    specs = [make_spec("A"), make_spec("B", sliding_window=True)]
    full, window = decide(make_decider(specs, TWO), FULL, WINDOW)
    assert (full.selected["decode"], window.selected["decode"]) == ("A", "B")
    assert full.warnings == ()


def test_kinds_that_disagree_take_the_combination_of_the_least_ranks(make_spec: Any, make_decider: Any) -> None:
    specs = [
        make_spec("A", layouts=["FLASHINFER_NHD"]),
        make_spec("B", layouts=["FLASHINFER_HND"], sliding_window=True),
        make_spec("C", layouts=["FLASHINFER_NHD"], sliding_window=True),
    ]
    full, window = decide(make_decider(specs, RULES), FULL, WINDOW)
    # A with C costs 1 + 3 per phase, B with B 2 + 2: the earlier kind's wish decides the tie.
    assert (full.selected["decode"], window.selected["decode"]) == ("A", "C")
    assert full.kv_layout == window.kv_layout == "FLASHINFER_NHD"
    assert any("shares its pool" in w for w in window.warnings)


def test_a_kind_that_prefers_another_layout_takes_the_pools(make_spec: Any, make_decider: Any) -> None:
    specs = [
        make_spec("A", layouts=["FLASHINFER_HND"]),
        make_spec("B", layouts=["FLASH_ATTN_NHD", "FLASHINFER_HND"], sliding_window=True),
    ]
    full, window = decide(make_decider(specs, TWO), FULL, WINDOW)
    assert full.kv_layout == window.kv_layout == "FLASHINFER_HND"
    assert window.cache_shape == ["num_blocks", 2, 8, 16, 64]


def test_block_sizes_are_made_equal(make_spec: Any, make_decider: Any) -> None:
    specs = [make_spec("A", blocks=[16]), make_spec("B", blocks=[64], sliding_window=True)]
    full, window = decide(make_decider(specs, RULES), FULL, WINDOW)
    assert full.block_size == window.block_size == 64
    assert full.selected["decode"] == "A"


def test_block_sizes_without_a_common_wish_meet_at_their_least_common_multiple(
    make_spec: Any, make_decider: Any
) -> None:
    specs = [make_spec("A", blocks=[48]), make_spec("B", blocks=[64], sliding_window=True)]
    full, window = decide(make_decider(specs, TWO), FULL, WINDOW)
    assert full.block_size == window.block_size == 192


def test_where_nothing_fits_all_each_keeps_its_own_and_a_warning_says_so(make_spec: Any, make_decider: Any) -> None:
    specs = [
        make_spec("A", layouts=["FLASHINFER_NHD"]),
        make_spec("B", layouts=["FLASHINFER_HND"], sliding_window=True, head_sizes=HeadSizes(values=(32,))),
    ]
    full, window = decide(make_decider(specs, RULES), FULL, WINDOW.model_copy(update={"head_size": 32}))
    assert (full.kv_layout, window.kv_layout) == ("FLASHINFER_NHD", "FLASHINFER_HND")
    assert all(
        any("no KV layout and block size serves all layer kinds" in w for w in s.warnings) for s in (full, window)
    )


def test_encoders_do_not_take_part(make_spec: Any, make_decider: Any) -> None:
    encoder = AttentionConfig(num_heads=8, head_size=64, attn_type="encoder")
    specs = [make_spec("A", layouts=["FLASHINFER_NHD"]), make_spec("B", layouts=[], attn_types=("encoder",))]
    selections = decide(make_decider(specs, RULES), FULL, encoder)
    assert [s.kv_layout for s in selections] == ["FLASHINFER_NHD", None]
