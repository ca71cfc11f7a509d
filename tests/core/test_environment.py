"""What counts as installed, without importing anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attn_select.backends.spec import Library
from attn_select.errors import ConfigError
from attn_select.machine.environment import (
    Environment,
    has_module,
    installed_version,
    parse_pins,
)

Install = Callable[..., None]
NOT_TO_BE_IMPORTED = "raise RuntimeError('imported')"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution and its module, either of which may be left out."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(distribution: str | None, version: str | None = "1.0", module: str | None = "the_kernel") -> None:
        if distribution is not None:
            folder = tmp_path / f"{distribution.replace('-', '_')}-{version or '0'}.dist-info"
            folder.mkdir()
            lines = f"Metadata-Version: 2.4\nName: {distribution}\n" + (f"Version: {version}\n" if version else "")
            (folder / "METADATA").write_text(lines + "\nVersion: 9.9 is in the description\n")
        if module is not None:
            (tmp_path / module).mkdir()
            (tmp_path / module / "__init__.py").write_text(NOT_TO_BE_IMPORTED)

    return install


def library(version: str = "", module: str = "the_kernel", distribution: str = "the-kernel") -> Library:
    return Library(distribution, module, "pip install the-kernel", version)


@pytest.mark.parametrize(
    ("installed", "needed", "state"),
    [
        ("1.0", "", "installed"),
        ("1.0", ">=1.0", "installed"),
        ("1.0+cu130", "==1.0", "installed"),
        ("1.1rc1", ">=1.0", "installed"),
        ("1.0", ">=1.1", "wrong-version"),
        ("1.10", ">=1.9,<2", "installed"),
        ("by hand", ">=1.0", "wrong-version"),
        ("by hand", "", "installed"),
        ("1.0", "nonsense", "wrong-version"),
        (None, "", "installed"),
        (None, ">=1.0", "wrong-version"),
    ],
)
def test_versions_of_an_installed_library(install: Install, installed: str | None, needed: str, state: str) -> None:
    install("the-kernel", installed)
    environment = Environment()
    assert environment.state(library(needed)) == state
    assert environment.has(library(needed)) is (state == "installed")
    assert environment.version("The_Kernel") == installed
    assert "the_kernel" not in sys.modules


def test_metadata_without_a_module_is_broken(install: Install) -> None:
    install("the-kernel", module=None)
    assert Environment().state(library()) == "broken"
    assert Environment().state(library(">=2")) == "broken"


def test_a_module_without_metadata_counts(install: Install) -> None:
    install(None)
    assert Environment().state(library()) == "installed"
    assert Environment().version("the-kernel") is None
    assert Environment().state(library(">=1.0")) == "wrong-version"  # nobody knows its version


def test_a_parent_package_is_never_imported(install: Install) -> None:
    install(None)
    assert has_module("the_kernel")
    assert has_module("the_kernel.sub.module")
    assert "the_kernel" not in sys.modules


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"Name: the-kernel\n\nVersion: 1.0\n"])
def test_broken_metadata(install: Install, tmp_path: Path, content: bytes) -> None:
    install("the-kernel")
    (tmp_path / "the_kernel-1.0.dist-info" / "METADATA").write_bytes(content)
    assert installed_version("the-kernel") is None
    assert Environment().state(library()) == "installed"
    assert Environment().state(library(">=1")) == "wrong-version"


def test_an_assumed_environment_has_everything_at_no_known_version(install: Install) -> None:
    install("the-kernel", "1.0")
    environment = Environment(assume_installed=True)
    assert environment.state(library()) == "assumed"
    assert environment.state(library(">=99")) == "assumed"
    assert environment.state(library(distribution="absent", module="absent")) == "assumed"
    assert environment.version("the-kernel") is None


def test_pins_of_an_assumed_environment() -> None:
    environment = Environment(assume_installed=True, pins={"The_Kernel": "1.5"})
    assert environment.version("the-kernel") == "1.5"
    assert environment.state(library(">=1.5")) == "assumed"
    assert environment.state(library(">=1.6")) == "wrong-version"


def test_pins_beat_what_is_installed(install: Install) -> None:
    install("the-kernel", "1.0")
    environment = Environment(pins={"the-kernel": "2.0"})
    assert environment.version("the-kernel") == "2.0"
    assert environment.state(library(">=2")) == "assumed"
    assert environment.state(library("<2")) == "wrong-version"
    assert Environment(pins={"absent": "1"}).state(library(distribution="absent", module="absent")) == "assumed"
    assert environment.state(library(distribution="absent", module="absent")) == "missing"


def test_the_first_usable_alternative() -> None:
    environment = Environment(assume_installed=True, pins={"a": "1"})
    a, b = library(">=2", distribution="a"), library(distribution="b")
    assert environment.first((a, b)) is b
    assert environment.first([a]) is None
    assert environment.first(()) is None


def test_environments_are_equal_by_value() -> None:
    one = Environment(assume_installed=True, pins={"A_b": "1", "c": "2"}, variables={"CC": "gcc"}, cuda="13.0")
    same = Environment(assume_installed=True, pins={"c": "2", "a-b": "1"}, variables={"CC": "gcc"}, cuda="13.0")
    same.version("c")
    assert (one, hash(one)) == (same, hash(same))
    for changes in ({"assume_installed": False}, {"pins": {}}, {"variables": {}}, {"cuda": None}):
        assert replace(one, **changes) != one  # type: ignore[arg-type]


def test_pins_are_parsed() -> None:
    assert parse_pins([]) == {}
    assert parse_pins(["FlashInfer_Python==0.6.14", " torch == 2.11.0+cu130", "x==1.0.post1"]) == {
        "flashinfer-python": "0.6.14",
        "torch": "2.11.0+cu130",
        "x": "1.0.post1",
    }
    assert parse_pins(("a==1.0", "A==1.0")) == {"a": "1.0"}


@pytest.mark.parametrize(
    "pin",
    [
        "",
        "torch",
        "torch==",
        "torch==new",
        "torch==2.*",
        "-x==1",
    ],
)
def test_pins_that_are_refused(pin: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pins([pin])
    assert caught.value.fields == ("with",)
    assert "NAME==VERSION" in str(caught.value)
    assert repr(pin) in str(caught.value)
    assert caught.value.hint == "e.g. --with flashinfer-python==0.6.14"
