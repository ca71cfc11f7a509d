"""Layers that keep a state pass the same gate, rules and selection as attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attn_select import AttentionConfig, NoBackendError, select, select_model
from attn_select.layer.state import StateConfig

KDA = StateConfig(recurrence="kda", num_heads=8, head_size=128, conv_kernel_size=4)
GQA = AttentionConfig(num_heads=16, num_kv_heads=2, head_size=256)


def rules(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "selector_rules.toml"
    path.write_text(f"version = 1\n{text}")
    return path


def test_only_backends_of_states_are_candidates() -> None:
    states, attention = select(KDA, "h200"), select(GQA, "h200")
    assert {candidate.backend for candidate in states.candidates} == {
        "FLA",
        "FLASHINFER_GDN",
        "FLASHINFER_KDA",
        "FLASHINFER_MAMBA",
        "TORCH_STATE",
        "TRITON_STATE",
    }
    assert not {"FLA", "TORCH_STATE"} & {candidate.backend for candidate in attention.candidates}
    assert [rule.name for rule in states.rules] == ["states", "states-decode"]


def test_the_plan_says_layout_and_bytes() -> None:
    selection = select(KDA, "cpu")
    assert selection.selected == {"prefill": "TORCH_STATE", "decode": "TORCH_STATE"}
    assert (selection.kv_layout, selection.block_size) == ("STATE_KV", None)
    plan = selection.to_dict()["plan"]
    assert plan["cache_shape"] == ["num_slots", 8, 128, 128]
    assert plan["cache_dtype"] == "float32"
    assert plan["bytes_per_request"] == 8 * 128 * 128 * 4 + 3 * 3 * 8 * 128 * 2
    assert plan["bytes_per_token"] is None
    assert selection.cache_format is None
    assert selection.state_format is not None
    assert selection.cache_fingerprint == selection.state_format.fingerprint
    assert "per request and layer, whatever its length" in selection.explain()
    assert "convolution of 4 tokens" in selection.explain()


def test_rules_name_the_recurrence(tmp_path: Path) -> None:
    found = rules(tmp_path, '[[rules]]\nname = "mine"\nwhen = { recurrence = "kda" }\nprefer = ["TORCH_STATE"]\n')
    assert select(KDA, "h200", found).selected["decode"] == "TORCH_STATE"
    mamba = StateConfig(recurrence="mamba2", num_heads=8, head_size=128)
    assert select(mamba, "h200", found).selected["decode"] == "TRITON_STATE"


@pytest.mark.parametrize("condition", ["mla = false", "sliding_window = 'none'", "num_kv_heads = '>=1'"])
def test_rules_about_attention_do_not_hold_for_states(tmp_path: Path, condition: str) -> None:
    found = rules(tmp_path, f'[[rules]]\nname = "mine"\nwhen = {{ {condition} }}\ndeny = ["TRITON_STATE"]\n')
    assert select(KDA, "h200", found).selected["decode"] == "TRITON_STATE"


def test_a_named_backend_of_attention_is_refused_for_a_state() -> None:
    found = select(KDA, "h200", backend="FLASH_ATTN")
    assert found.selected == {"prefill": None, "decode": None}
    with pytest.raises(NoBackendError, match=r"FLASH_ATTN .*serves no layers that keep a state"):
        found.require()
    attention = select(GQA, "h200", backend="FLA").explain()
    assert "serves layers that keep a state only" in attention


def test_a_named_backend_counts_for_the_layers_that_it_is_for() -> None:
    both: list[Any] = [KDA, GQA]
    state, attention = select_model(both, "h200", backend="TRITON_ATTN")
    assert (state.selected["decode"], attention.selected["decode"]) == ("TRITON_STATE", "TRITON_ATTN")
    state, attention = select_model(both, "h200", backend="TORCH_STATE")
    assert (state.selected["decode"], attention.explicit) == ("TORCH_STATE", {})


def test_no_survey_times_states_so_the_rules_decide() -> None:
    found = select(KDA, "h200", workload="64q1s1k")
    assert found.selected == select(KDA, "h200", times=False).selected
    assert "was not surveyed on such layers" in str(found.to_dict())
