"""Importing a build of a kernel: its version, its module and the signatures of its functions are compared first."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from attn_select.backends.kernel_builds import KernelBuild
from attn_select.backends.spec import Library
from attn_select.errors import KernelMismatchError

pytest.importorskip("torch")

from attn_select.runtime.installed_builds import InstalledBuild

LIBRARY = Library("acme-attention", "acme", "pip install acme-attention", ">=2,<3")
BUILD = KernelBuild(kernel="Acme", library=LIBRARY, module="acme.attention")
HINT = "this plugin is written for acme-attention>=2,<3: install such a version, or choose another distribution"


def attend(query: Any, cache: Any, scale: float, out: Any = None, lse: bool = False) -> None: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed module ``acme.attention`` of version 2.1 with the function ``attend``."""
    monkeypatch.setattr("attn_select.machine.environment.installed_version", {"acme-attention": "2.1"}.get)
    monkeypatch.setattr("attn_select.machine.environment.has_module", lambda name: True)
    made: Any = ModuleType("acme.attention")
    made.attend = attend
    monkeypatch.setitem(sys.modules, "acme", ModuleType("acme"))
    monkeypatch.setitem(sys.modules, "acme.attention", made)
    return made


def test_a_function_that_takes_what_is_passed_is_returned(module: Any) -> None:
    installed = InstalledBuild(BUILD)
    assert installed.module is module
    assert installed.function("attend", ("query", "cache", "scale"), ("out",)) is attend
    assert installed.function("attend", ("query", "cache"), ("scale", "lse")) is attend


@pytest.mark.parametrize(
    ("positional", "keywords", "says"),
    [
        (("cache", "query", "scale"), (), "its first parameters are not cache, query, scale"),
        (("query", "cache", "scale"), ("out", "sinks", "window"), "it takes no argument sinks, window"),
        (("query", "cache"), ("out",), "it requires scale, which this plugin does not pass"),
    ],
)
def test_another_signature_is_refused(
    module: Any, positional: tuple[str, ...], keywords: tuple[str, ...], says: str
) -> None:
    with pytest.raises(KernelMismatchError) as info:
        InstalledBuild(BUILD).function("attend", positional, keywords)
    assert info.value.message == (
        f"Acme of acme-attention: acme.attention.attend has another signature: {says}. "
        "It takes (query, cache, scale, out, lse)"
    )
    assert str(info.value.hint).startswith(HINT)


def test_a_function_that_is_gone_is_named(module: Any) -> None:
    with pytest.raises(KernelMismatchError, match=r"Acme of acme-attention: acme\.attention\.plan does not exist"):
        InstalledBuild(BUILD).function("plan")
    other = ModuleType("acme.other")
    with pytest.raises(KernelMismatchError, match=r"acme\.other\.attend does not exist"):
        InstalledBuild(BUILD).function("attend", module=other)


def test_another_version_is_refused_before_anything_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_select.machine.environment.installed_version", {"acme-attention": "3.0"}.get)
    monkeypatch.setattr("attn_select.machine.environment.has_module", lambda name: True)
    with pytest.raises(KernelMismatchError, match=r"acme-attention 3\.0 is installed, >=2,<3 is needed") as info:
        InstalledBuild(BUILD)
    assert info.value.hint == "pip install --upgrade acme-attention"


@pytest.mark.parametrize("error", [ImportError("no libacme.so"), OSError("bad ELF"), RuntimeError("operator exists")])
def test_a_module_that_cannot_be_imported_says_why(
    module: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ImportError) as info:
        InstalledBuild(BUILD)
    assert isinstance(info.value, KernelMismatchError)
    assert info.value.__cause__ is error
    assert f"acme.attention cannot be imported ({type(error).__name__}: {error})" in info.value.message
    assert info.value.hint == "install it: pip install acme-attention"
