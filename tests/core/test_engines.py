"""Adapters take part in the releases that they were run with, and say so where they do not."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from attn_select import clear_cache
from attn_select.engines.adapter import Adapter
from attn_select.engines.observed import counter
from attn_select.engines.wrap import wrap
from attn_select.errors import RulesError
from attn_select.machine.variables import ANY_VERSION, RULES, STRICT


def adapter(version: str, said: list[str]) -> Adapter:
    return Adapter("attn-select-acme", "Acme", version, ("0.26", "0.32.1"), said.append)


@pytest.mark.parametrize("version", ["0.26", "0.26.0", "0.26.3", "0.26.0+cu130", "0.32.1"])
def test_a_listed_release(version: str) -> None:
    said: list[str] = []
    installed: list[str] = []
    assert adapter(version, said).joins(lambda: installed.append(version))
    assert said == []
    assert installed == [version]


@pytest.mark.parametrize("version", ["0.2", "0.260.0", "0.32.10", "0.32.0", "0.27.0", "1.0"])
def test_another_release(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    installed: list[str] = []
    assert not adapter(version, said).joins(lambda: installed.append(version))
    assert installed == []
    assert said == [
        f"attn-select-acme takes no part in Acme {version}, which chooses attention by itself: it was run with 0.26 "
        "and 0.32.1 alone. ATTN_SELECT_ANY_VERSION=1 in the environment lets it take part"
    ]
    monkeypatch.setenv(ANY_VERSION, "1")
    assert adapter(version, said).joins(lambda: installed.append(version))
    assert len(said) == 1


def test_a_backend_that_nobody_knows_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.toml").write_text('version = 1\n[[rules]]\nname = "mine"\navoid = ["FLASH_ATN"]\n')
    monkeypatch.setenv(RULES, str(tmp_path / "r.toml"))
    clear_cache()
    said: list[str] = []
    own = adapter("0.26.0", said)
    assert any(rule.name == "mine" for rule in own.rules().rules)
    assert len(said) == 1
    assert "r.toml:2: rule 'mine'" in said[0]
    monkeypatch.setenv(STRICT, "1")
    with pytest.raises(RulesError):
        own.rules()
    clear_cache()


@pytest.mark.parametrize("error", [KeyError("it has moved"), RulesError("broken"), ValueError("ours")])
def test_what_fails_leaves_the_engine_to_itself(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    own = adapter("0.26.0", said)

    def fails() -> str:
        raise error

    assert own.unless_it_fails(lambda: "chosen") == "chosen"
    assert own.unless_it_fails(fails) is None
    assert not own.joins(fails)
    assert len(said) == 2
    monkeypatch.setenv(STRICT, "1")
    if not isinstance(error, KeyError):
        with pytest.raises(type(error)):
            own.unless_it_fails(fails)
    else:
        assert own.unless_it_fails(fails) is None


@pytest.mark.parametrize(
    ("value", "strict"), [("true", True), ("YES", True), ("0", False), ("False", False), ("", False)]
)
def test_a_switch_is_on_however_it_is_written(monkeypatch: pytest.MonkeyPatch, value: str, strict: bool) -> None:
    def fails() -> str:
        raise RulesError("broken")

    monkeypatch.setenv(STRICT, value)
    with pytest.raises(RulesError) if strict else nullcontext():
        assert adapter("0.26.0", []).unless_it_fails(fails) is None
    monkeypatch.setenv(ANY_VERSION, value)
    assert adapter("0.999.0", []).joins(lambda: None) is strict


def test_steps_are_counted_until_the_engine_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    read: list[dict[str, int]] = []

    def lengths_of(step: dict[str, int]) -> tuple[list[int], list[int]]:
        read.append(step)
        return [step["new"]], [step["all"]]

    count = counter(adapter("0.26.0", said), lengths_of, lambda _: None)
    for step in ({"new": 1, "all": 9}, {}, {"new": 1, "all": 9}):
        count(step)
    assert len(read) == 2
    assert len(said) == 1
    assert "an interface has moved" in said[0]


class Engine:
    def method(self, text: str) -> str:
        return text

    @classmethod
    def of_class(cls, text: str) -> str:
        return f"{cls.__name__} {text}"


@pytest.mark.parametrize(("name", "wanted"), [("method", "<here>"), ("of_class", "<Engine here>")])
def test_a_function_is_wrapped_once(name: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, name, vars(Engine)[name])
    for _ in range(2):
        wrap(Engine, name, lambda original, *arguments, **options: f"<{original(*arguments, **options)}>")
    owner = Engine if name == "of_class" else Engine()
    assert getattr(owner, name)(text="here") == wanted
    with pytest.raises(AttributeError):
        wrap(Engine, "moved", lambda original: None)
