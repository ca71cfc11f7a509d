"""``[backends.NAME]`` tables, read through the plugin's own model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field, field_validator, model_validator

from attn_select.backends.spec import BackendOptions, BackendSpec
from attn_select.errors import RulesError
from attn_select.rules import load_rules
from attn_select.rules.options import read_options

MakeSpec = Callable[..., BackendSpec]
RulesFile = Callable[..., Path]


class Options(BackendOptions):
    use_trtllm: Literal["auto", "on", "off"] = "auto"
    splits: int = Field(1, ge=1, le=128)
    even: int = 2

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("Must be even")
        return 1 // (value + 2) or value  # breaks on -2

    @model_validator(mode="after")
    def _together(self) -> Options:
        if self.use_trtllm == "on" and self.splits > 1:
            raise ValueError("use_trtllm = 'on' goes with splits = 1 only")
        return self


def read(spec: MakeSpec, *paths: Path) -> dict[str, Any]:
    return {**read_options(load_rules(paths), {"MINE": spec("MINE", options=Options), "PLAIN": spec()})}


def test_defaults(spec: MakeSpec) -> None:
    options = read(spec)
    assert options == {"MINE": Options(), "PLAIN": BackendOptions()}
    assert options["MINE"].use_trtllm == "auto"


def test_values_of_all_layers(spec: MakeSpec, rules_file: RulesFile) -> None:
    one = rules_file('[backends.MINE]\nuse_trtllm = "off"\nsplits = 4\n', "one.toml")
    two = rules_file("[backends.MINE]\nsplits = 8\n[backends.ABSENT]\nanything = 1\n", "two.toml")
    assert read(spec, one, two)["MINE"] == Options(use_trtllm="off", splits=8)


@pytest.mark.parametrize(
    ("body", "line", "named"),
    [
        ("use_trtlm = 1", 4, ["backends.MINE: unknown option 'use_trtlm'; did you mean use_trtllm?"]),
        ("use_trtllm = 'yes'", 4, ["backends.MINE.use_trtllm = 'yes'", "'auto', 'on' or 'off'"]),
        ("splits = 0", 4, ["backends.MINE.splits = 0", "greater than or equal to 1"]),
        ("splits = 'many'", 4, ["backends.MINE.splits = 'many'", "integer"]),
        ("splits = [1]", 4, ["backends.MINE.splits = [1]"]),
        ("even = 3", 4, ["backends.MINE.even = 3: must be even"]),
        ("even = -2", 3, ["backends.MINE: the plugin's options model raised ZeroDivisionError"]),
        ("use_trtllm = 'on'\nsplits = 2", 3, ["backends.MINE: use_trtllm = 'on' goes with splits = 1 only"]),
        ('"" = 1', 4, ["unknown option ''"]),
        ('"a\\u001Bb" = 1', 4, ["unknown option 'a\\x1bb'"]),
    ],
)
def test_bad_values_name_file_line_key_and_what_is_accepted(
    spec: MakeSpec, rules_file: RulesFile, body: str, line: int, named: list[str]
) -> None:
    path = rules_file(f"\n[backends.MINE]\n{body}\n")
    with pytest.raises(RulesError) as caught:
        read(spec, path)
    ((file, found_line, text),) = caught.value.problems
    assert (file, found_line) == (str(path), line)
    assert all(part in text for part in named), text
    assert str(caught.value).startswith(f"{path}:{line}: {text}")


def test_a_backend_without_options(spec: MakeSpec, rules_file: RulesFile) -> None:
    with pytest.raises(RulesError, match=r"backends\.PLAIN: unknown option 'x'; it has no options"):
        read(spec, rules_file("[backends.PLAIN]\nx = 1\n"))


def test_all_problems_at_once_each_with_its_own_origin(spec: MakeSpec, rules_file: RulesFile) -> None:
    one = rules_file("[backends.MINE]\nsplits = 0\n[backends.PLAIN]\ny = 1\n", "one.toml")
    two = rules_file("\n[backends.MINE]\nx = 1\n", "two.toml")
    with pytest.raises(RulesError) as caught:
        read(spec, one, two)
    assert sorted((Path(file).name, line) for file, line, _ in caught.value.problems) == [
        ("one.toml", 3),
        ("one.toml", 5),
        ("two.toml", 4),
    ]
