"""The table of the MLA entry's arguments says what both releases have, and what the backends pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mla_entry
import pytest

from attn_select.layer.config import AttentionConfig

pytest.importorskip("torch")

import flashinfer_mla_groups as layers
from test_flashinfer_signatures import READ

ENTRY = "trtllm_batch_decode_with_kv_cache_mla"
DEFAULTS = dict(READ["0.6.14"]["signatures"][f"mla.{ENTRY}"])
ARGUMENTS = mla_entry.arguments()


def test_every_argument_of_both_releases_is_in_the_table() -> None:
    old, new = (
        [name for name, _ in READ[release]["signatures"][f"mla.{ENTRY}"]] for release in ("0.6.14", "0.7.2.post1")
    )
    assert set(ARGUMENTS) == set(new)
    assert {name for name, entry in ARGUMENTS.items() if "since" not in entry} == set(old)


def test_an_argument_is_used_or_refused_with_a_reason() -> None:
    for name, entry in ARGUMENTS.items():
        assert ("used" in entry) != ("unused" in entry), name
        assert mla_entry.users(entry) <= set(mla_entry.USERS), name


def passed(world: Any) -> set[str]:
    """Return the arguments of all calls that are not left at their defaults."""
    return {
        name
        for call in world.named(ENTRY)
        for name, value in call.items()
        if name in DEFAULTS and repr(value) != DEFAULTS[name]
    }


CASES: dict[str, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "trtllm-gen": [
        ("b200", {"num_speculative_tokens": 3, "sinks": True}, {"skip_softmax_threshold": 1.0}),
        ("b200", {"num_speculative_tokens": 3, "kv_cache_dtype": "fp8"}, {"device_scales": True}),
    ],
    "cute-dsl": [
        ("b200", {"num_speculative_tokens": 3, "kv_cache_dtype": "fp8"}, {"cute_dsl": True}),
        ("b200", {"sinks": True}, {"cute_dsl": True}),
    ],
    "xqa": [("rtx5090", {"kv_cache_dtype": "fp8"}, {})],
    "sparse": [
        ("b200", {"sparse_top_k": 2048, "sinks": True, "kv_cache_dtype": "fp8"}, {}),
        ("rtx5090", {"sparse_top_k": 2048, "kv_cache_dtype": "fp8"}, {}),
    ],
}
CAPABILITIES = {"b200": (10, 0), "rtx5090": (12, 0)}


@pytest.mark.parametrize("user", mla_entry.USERS)
def test_the_table_says_what_is_passed(user: str, emulate: Callable[..., Any]) -> None:
    found: set[str] = set()
    for gpu, fields, options in CASES[user]:
        world = emulate(CAPABILITIES[gpu], release="0.7.2.post1")
        config: AttentionConfig = layers.mla_config(**fields)
        group = layers.group_for(gpu, config, phases=["decode"], **options)
        for lse in (False, True):
            if lse and not group.selection.plans["decode"].returns_lse:
                continue
            lengths = [(1, 129), (4, 70), (3, 9)] if config.num_speculative_tokens else [(1, 129), (1, 9)]
            layers.run(group, layers.problem_for(group, lengths), wants_lse=lse)
        found |= passed(world)
    assert found == {name for name, entry in ARGUMENTS.items() if user in mla_entry.users(entry)}


def test_the_page_is_written_from_the_table() -> None:
    assert mla_entry.PAGE.read_text("utf-8") == mla_entry.page(), "run python plugins/flashinfer/tests/mla_entry.py"
