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
    assert [rule.name for rule in states.rules] == ["states"]


def test_rules_name_the_recurrence(tmp_path: Path) -> None:
    found = rules(tmp_path, '[[rules]]\nname = "mine"\nwhen = { recurrence = "kda" }\nprefer = ["TORCH_STATE"]\n')
    assert select(KDA, "h200", found).selected["decode"] == "TORCH_STATE"
    mamba = StateConfig(recurrence="mamba2", num_heads=8, head_size=128)
    assert select(mamba, "h200", found).selected["decode"] == "FLA"


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
    assert (state.selected["decode"], attention.selected["decode"]) == ("FLA", "TRITON_ATTN")
    state, attention = select_model(both, "h200", backend="TORCH_STATE")
    assert (state.selected["decode"], attention.explicit) == ("TORCH_STATE", {})


def test_no_survey_times_states_so_the_rules_decide() -> None:
    found = select(KDA, "h200", workload="64q1s1k")
    assert found.selected == select(KDA, "h200", times=False).selected
    assert "was not surveyed on such layers" in str(found.to_dict())
