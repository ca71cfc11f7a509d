"""Layer kinds that share a cache pool get one KV layout and one block size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attn_select.backends.spec import BackendPlan, HeadSizes
from attn_select.decide.explicit import Choice
from attn_select.decide.shared_pool import agree_on_pool
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.times.choice import EvidenceUsed

FULL = AttentionConfig(num_heads=8, head_size=64)
WINDOW = AttentionConfig(num_heads=8, head_size=64, sliding_window=128)
RULES = [{"name": "order", "priority": ["A", "B", "C"]}]
TWO = [{"name": "order", "priority": ["A", "B"]}]


def decide(decider: Any, *configs: AttentionConfig) -> Any:
    return agree_on_pool(configs, deciding(decider, Choice()))


def deciding(decider: Any, choice: Choice) -> Any:
    return lambda config, kv_layout=None: decider.decide(config, choice, kv_layout)


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


def test_a_backend_that_does_not_read_the_pools_layout_says_so(make_spec: Any, make_decider: Any) -> None:
    decider = make_decider(
        [make_spec("A", layouts=["FLASHINFER_HND"]), make_spec("B", layouts=["FLASHINFER_NHD"])], TWO
    )
    selection = decider.decide(FULL, Choice(), "FLASHINFER_NHD")
    assert selection.selected == {"prefill": "B", "decode": "B"}
    (refused,) = (c.phases["decode"] for c in selection.candidates if c.backend == "A")
    (reason,) = refused.reasons
    assert (reason.code, reason.observed, reason.supported) == ("kv-layout", "FLASHINFER_NHD", ["FLASHINFER_HND"])
    assert reason.message == "the shared pool has KV layout FLASHINFER_NHD (supported: FLASHINFER_HND)"


def test_a_block_size_that_a_kind_names_is_the_pools(make_spec: Any, make_decider: Any) -> None:
    specs = [make_spec("A", blocks=[32]), make_spec("B", blocks=[16]), make_spec("C", blocks=[16], sliding_window=True)]
    named = WINDOW.model_copy(update={"block_size": 16})
    # A is ranked first and would win with 32.
    full, window = decide(make_decider(specs, RULES), FULL, named)
    assert full.block_size == window.block_size == 16
    assert (full.selected["decode"], window.selected["decode"]) == ("B", "C")


def test_two_named_block_sizes_in_one_pool_are_refused(make_spec: Any, make_decider: Any) -> None:
    decider = make_decider([make_spec("A", sliding_window=True)], TWO)
    configs = [c.model_copy(update={"block_size": size}) for c, size in ((FULL, 16), (WINDOW, 32))]
    with pytest.raises(ConfigError, match="block_size = 16 and 32: layer kinds that share a cache pool") as caught:
        decide(decider, *configs)
    assert caught.value.fields == ("block_size",)


def test_a_backend_that_no_rule_ranks_costs_more_than_any_that_one_does(make_spec: Any, make_decider: Any) -> None:
    def plan(config: AttentionConfig, *_: Any) -> BackendPlan:
        sizes = (16, 64) if config.sliding_window is None else (64, 16)
        return BackendPlan(
            path="path",
            because="only one",
            query_dtype=config.dtype,
            returns_lse=True,
            kv_layouts=("FLASH_ATTN_NHD",),
            kernel_block_sizes=sizes,
            cuda_graph="ALWAYS",
        )

    specs = [make_spec("A"), make_spec("X", blocks=[16, 64], sliding_window=True, plan=plan)]
    rules = [
        {"name": "with-64", "priority": ["A", "X"], "when": {"block_size": 64}},
        {"name": "else", "priority": ["A"], "only": True},
    ]
    decider, choice = make_decider(specs, rules), Choice(default="X")
    assert [decider.decide(config, choice).block_size for config in (FULL, WINDOW)] == [16, 64]
    assert [s.block_size for s in agree_on_pool((FULL, WINDOW), deciding(decider, choice))] == [64, 64]


def test_encoders_do_not_take_part(make_spec: Any, make_decider: Any) -> None:
    encoder = AttentionConfig(num_heads=8, head_size=64, attn_type="encoder")
    specs = [make_spec("A", layouts=["FLASHINFER_NHD"]), make_spec("B", layouts=[], attn_types=("encoder",))]
    full, alone = decide(make_decider(specs, RULES), FULL, encoder)
    assert [s.kv_layout for s in (full, alone)] == ["FLASHINFER_NHD", None]
    assert alone.config is encoder  # not asked again with the pool's block size


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"FLASHINFER_NHD": (100.0, 90.0), "FLASHINFER_HND": (95.0, 60.0)}, ("B", "B")),
        ({"FLASHINFER_NHD": (100.0, 60.0), "FLASHINFER_HND": (95.0, 90.0)}, ("A", "C")),
        ({"FLASHINFER_NHD": (100.0, 60.0), "FLASHINFER_HND": (98.0, 60.0)}, ("A", "C")),  # a tie: by ranks
        ({"FLASHINFER_NHD": (100.0, None), "FLASHINFER_HND": (95.0, 60.0)}, ("A", "C")),  # not all are known
    ],
)
def test_a_pool_takes_the_combination_of_the_least_time(
    times: dict[str, tuple[Any, ...]], chosen: tuple[str, str], make_spec: Any, make_decider: Any
) -> None:
    specs = [
        make_spec("A", layouts=["FLASHINFER_NHD"]),
        make_spec("B", layouts=["FLASHINFER_HND"], sliding_window=True),
        make_spec("C", layouts=["FLASHINFER_NHD"], sliding_window=True),
    ]
    decided = deciding(make_decider(specs, RULES), Choice())

    def timed(config: AttentionConfig, kv_layout: str | None = None) -> Any:
        selection = decided(config, kv_layout)
        full, window = times[selection.kv_layout]
        time_us = full if config.sliding_window is None else window
        return replace(selection, evidence=EvidenceUsed("", "", "", "", 1, 1.0, {}, time_us, {}))

    found = agree_on_pool([FULL, WINDOW], timed)
    assert tuple(selection.selected["decode"] for selection in found) == chosen
