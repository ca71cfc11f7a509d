"""The words of every backend's plans, read as a whole: a change of one shows in the difference of a file."""

from __future__ import annotations

from wording import ROOT, kept_in, wording

from attn_select.backends.registry import load_plugins


def test_plans_say_what_was_read_and_agreed_to() -> None:
    found = wording()
    assert set(found) == set(load_plugins().specs)
    kept = {kept_in(name) for name in found}
    assert kept == set(ROOT.glob("plugins/*/tests/wording/*.txt"))
    changed = [name for name, text in found.items() if text != kept_in(name).read_text("utf-8")]
    assert not changed, f"{', '.join(changed)}: run python tests/decision/wording.py, and read the difference"
