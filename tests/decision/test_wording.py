"""The words of every backend's plans, read as a whole: a change of one shows in the difference of ``wording/``."""

from __future__ import annotations

from wording import FOLDER, wording

from attn_select.rules.plugins import load_plugins


def test_plans_say_what_was_read_and_agreed_to() -> None:
    found = wording()
    kept = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.txt")}
    assert set(found) == set(kept) == set(load_plugins().specs)
    changed = [name for name, text in found.items() if text != kept[name]]
    assert not changed, f"{', '.join(changed)}: run python tests/decision/wording.py, and read the difference"
