"""The JSON Schema for editors says what the loader says."""

from __future__ import annotations

import enum
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from attn_select.backends.registry import Registry
from attn_select.backends.spec import BackendOptions, BackendSpec
from attn_select.errors import RulesError
from attn_select.rules import load_rules
from attn_select.rules.layers import packaged_rules_path
from attn_select.rules.schema import rules_schema

jsonschema = pytest.importorskip("jsonschema")


class Mode(enum.Enum):
    AUTO = "auto"
    ALWAYS = "always"


class Split(BaseModel):
    count: int = 1


class Options(BackendOptions):
    mode: Mode = Field(Mode.AUTO, description="how")
    split: Split = Split()


class WithoutSchema(BackendOptions):
    function: Callable[[], None] | None = None


@pytest.fixture(scope="module")
def schema(spec: Callable[..., BackendSpec]) -> dict[str, Any]:
    specs = {"MINE": spec("MINE", options=Options), "ODD": spec("ODD", options=WithoutSchema), "PLAIN": spec()}
    found = rules_schema(Registry(specs=specs))
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def problems(schema: dict[str, Any], text: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return [error.message for error in validator.iter_errors(tomllib.loads(f"version = 1\n{text}"))]


def test_the_packaged_rules_are_valid(schema: dict[str, Any]) -> None:
    document = tomllib.loads(packaged_rules_path().read_text(encoding="utf-8"))
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(document)) == []


RULE = '[[rules]]\nname = "r"\n'
GOOD = [
    "",
    RULE + 'deny = ["MINE", "FLASHMLA"]\nbecause = "x"\nphase = "decode"\n',
    RULE + "enabled = false\n",
    RULE + 'priority = ["MINE"]\nonly = true\n',
    RULE + 'prefer = ["MINE"]\nphase = "prefill"\n',
    RULE + 'avoid = ["MINE"]\nwhen = { mla = true, num_heads = ["<=16", 32], compute_capability = "9.x" }\n',
    RULE + 'avoid = ["MINE"]\nwhen = { kv_cache_dtype = ["fp8*", "bf16"], gpu = "h*", logits_soft_cap = 30.5 }\n',
    RULE + 'avoid = ["MINE"]\nwhen = { library = { a = "<1" }, cuda = [">=12.8", "<13"] }\n',
    '[backends.MINE]\nmode = "always"\nsplit = { count = 2 }\n',
]
BAD = [
    'rule = "r"\n',
    "[[rules]]\ndeny = ['MINE']\n",
    RULE,
    RULE + 'deny = ["MINE"]\nprefer = ["MINE"]\n',
    RULE + 'deny = ["MINE", "MINE"]\n',
    RULE + 'evidence = "fastest"\n',
    RULE + 'priority = ["MINE"]\nonly = "yes"\n',
    RULE + 'deny = ["MINE"]\nenabled = "no"\n',
    RULE + 'deny = ["MINE"]\nwhen = { num_head = 3 }\n',
    RULE + 'deny = ["MINE"]\nwhen = { mla = "yes" }\n',
    RULE + 'deny = ["MINE"]\nwhen = { dtype = "int8" }\n',
    RULE + 'deny = ["MINE"]\nwhen = { library = "a" }\n',
    "backends = 3\n",
]


@pytest.mark.parametrize("text", GOOD)
def test_what_the_loader_accepts(schema: dict[str, Any], text: str, rules_file: Callable[..., Path]) -> None:
    load_rules([rules_file(text)])
    assert problems(schema, text) == []


@pytest.mark.parametrize("text", BAD)
def test_what_the_loader_refuses(schema: dict[str, Any], text: str, rules_file: Callable[..., Path]) -> None:
    with pytest.raises(RulesError):
        load_rules([rules_file(text)])
    assert problems(schema, text)


def test_names_and_options_of_the_plugins(schema: dict[str, Any]) -> None:
    assert problems(schema, RULE + 'deny = ["MIEN"]\n')
    assert problems(schema, "[backends.MIEN]\n")
    assert problems(schema, '[backends.MINE]\nmode = "never"\n')
    assert problems(schema, "[backends.MINE]\nsplit = { count = 'x' }\n")
    assert problems(schema, "[backends.PLAIN]\nx = 1\n")
    assert problems(schema, "[backends.ODD]\nx = 1\n") == []  # this plugin's options have no JSON Schema
    assert schema["properties"]["backends"]["properties"]["MINE"]["properties"]["mode"]["description"] == "how"
