"""Errors travel between processes whole: a worker pool that cannot unpickle one waits for ever."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from attn_select import AttentionConfig, select
from attn_select.decide.selection import NoBackendError
from attn_select.errors import AttnSelectError, RulesError, UnknownNameError
from attn_select.runtime import PoolError

if importlib.util.find_spec("torch") is not None:
    import attn_select.runtime  # noqa: F401  # its errors are subclasses, too


def subclasses(base: type[AttnSelectError]) -> Iterator[type[AttnSelectError]]:
    for each in base.__subclasses__():
        if each.__module__.startswith("attn_select"):
            yield each
            yield from subclasses(each)


GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "UnknownNameError": ("gpu", "h10", ("h100", "h20")),
    "NoBackendError": ("none", select(GQA, "t4", backend="FLASH_ATTN")),
    "PoolError": ("holds no blocks", "request 1"),
    "OutOfBlocksError": ("needs 2 more blocks", "request 1"),
}


def arguments_of(cls: type[AttnSelectError]) -> tuple[Any, ...]:
    """Return arguments that make such an error: a text for each that has no default, where nothing else is known."""
    parameters = inspect.signature(cls).parameters.values()
    needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    return ARGUMENTS.get(cls.__name__, tuple(f"the {name} that was wrong" for name in needed))


@pytest.mark.parametrize("cls", [AttnSelectError, *dict.fromkeys(subclasses(AttnSelectError))])
def test_every_error_survives_pickling_and_copying(cls: type[AttnSelectError]) -> None:
    error = cls(*arguments_of(cls), hint="what to do")
    error.add_note("seen by a worker")
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        check(pickle.loads(pickle.dumps(error, protocol)), error)
    check(copy.copy(error), error)
    check(copy.deepcopy(error), error)


def check(found: AttnSelectError, error: AttnSelectError) -> None:
    assert type(found) is type(error)
    assert (str(found), found.args, found.to_dict()) == (str(error), error.args, error.to_dict())
    plain = {key: value for key, value in vars(error).items() if key != "selection"}
    assert {key: value for key, value in vars(found).items() if key != "selection"} == plain


def test_an_error_may_have_a_code_of_its_own() -> None:
    assert AttnSelectError("x", code="own-code").to_dict() == {"code": "own-code", "message": "x", "hint": None}
    assert AttnSelectError("x").code == "error"


def test_what_an_error_knows_travels_with_it() -> None:
    unknown = pickle.loads(pickle.dumps(UnknownNameError("gpu", "h10", ("h100", "h20"))))
    assert (unknown.kind, unknown.name, unknown.nearest) == ("gpu", "h10", ["h100", "h20"])
    problems = [("rules.toml", 3, "no such field")]
    assert pickle.loads(pickle.dumps(RulesError("broken", problems=problems))).problems == tuple(problems)
    assert pickle.loads(pickle.dumps(PoolError("holds no blocks", ("request", 1)))).request == ("request", 1)
    none = NoBackendError("none", select(GQA, "t4", backend="FLASH_ATTN"))
    assert pickle.loads(pickle.dumps(none)).selection.to_dict() == none.selection.to_dict()
