"""Kernel libraries that are missing, too old or broken, as the gate names them."""

from __future__ import annotations

from gate_cases import PLAIN, MakeSpec, check

from attn_select.backends.spec import BackendPlan, Library
from attn_select.machine.environment import Environment

ONE = Library("one", "attn_select_tests_one", "pip install one", ">=2")
TWO = Library("two", "attn_select_tests_two", "pip install two")


def test_missing_libraries(spec: MakeSpec) -> None:
    found = check(spec(libraries=[[ONE, TWO], [TWO]]), {**PLAIN, "sinks": True}, environment=Environment())
    assert isinstance(found, list)
    assert sorted(reason.code for reason in found) == ["library-missing", "library-missing", "sinks"]
    either, two = [reason for reason in found if reason.code == "library-missing"]
    assert either.message == "one is not installed; two is not installed"
    assert either.observed == {"one": "missing", "two": "missing"}
    assert either.supported == ["one>=2", "two"]
    assert either.remedy == "pip install one"
    assert (two.supported, two.remedy) == (["two"], "pip install two")


def test_one_alternative_is_enough(spec: MakeSpec) -> None:
    environment = Environment(pins={"two": "1.0"})
    assert isinstance(check(spec(libraries=[[ONE, TWO]]), PLAIN, environment=environment), BackendPlan)
    assert isinstance(check(spec(libraries=[[ONE]]), PLAIN, environment=environment), list)


def test_a_wrong_version_is_named(spec: MakeSpec) -> None:
    environment = Environment(assume_installed=True, pins={"one": "1.9"})
    found = check(spec(libraries=[[ONE]]), PLAIN, environment=environment)
    assert isinstance(found, list)
    (reason,) = found
    assert (reason.code, reason.observed) == ("library-version", {"one": "wrong-version"})
    assert reason.message == "one 1.9 (needs >=2)"


def test_an_unknown_version_is_not_called_none(spec: MakeSpec) -> None:
    library = Library("no-such-distribution", "pytest", "pip install it", ">=2")  # a module without metadata
    found = check(spec(libraries=[[library]]), PLAIN, environment=Environment())
    assert isinstance(found, list)
    assert found[0].code == "library-version"
    assert "None" not in found[0].message
    assert "unknown version" in found[0].message


def test_metadata_without_a_module_is_said(spec: MakeSpec) -> None:
    library = Library("pytest", "attn_select_tests_no_module", "pip install pytest")
    found = check(spec(libraries=[[library]]), PLAIN, environment=Environment())
    assert isinstance(found, list)
    assert found[0].observed == {"pytest": "broken"}
    assert found[0].message == "pytest is installed but has no module attn_select_tests_no_module"
