"""Places in the order that rest on times of attn-select's kernels alone, which an engine's own kernel does not take."""

from __future__ import annotations

from pathlib import Path

from attn_select import AttentionConfig, select
from attn_select.engines.own_kernels import rests_on_our_times
from attn_select.testing.toolkit import GQA_FIELDS

USERS = 'version = 1\n[[rules]]\nname = "mine"\nprefer = ["TRITON_ATTN"]\n'


def rests(
    gpu: str = "h200", rules: Path | None = None, backend: str | None = None, instead: str = "FLASH_ATTN"
) -> bool:
    selection = select(AttentionConfig(**GQA_FIELDS), gpu, rules=rules, backend=backend)
    return rests_on_our_times(selection, "TRITON_ATTN", "decode", instead)


def test_a_place_before_what_rules_put_first_rests_on_times() -> None:
    assert rests()
    assert rests(instead="FLASHINFER")
    assert not rests(instead="FLEX_ATTENTION"), "the priority puts it behind"


def test_what_a_user_asks_for_does_not(tmp_path: Path) -> None:
    assert not rests(backend="TRITON_ATTN")
    rules = tmp_path / "rules.toml"
    rules.write_text(USERS)
    assert not rests(rules=rules)
    rules.write_text('version = 1\n[[rules]]\nname = "mine"\npriority = ["TRITON_ATTN", "FLASH_ATTN"]\n')
    assert not rests(rules=rules)
