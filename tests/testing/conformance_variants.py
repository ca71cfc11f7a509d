"""The documented example plugin, changed in one place: right and wrong backends for the conformance suite's tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from attn_select.backends.spec import BackendPlan, BackendSpec, Fact
from attn_select.testing import BackendConformance, load_path_of

HEADS = ((1, 1), (4, 2), (8, 1))
YES: Fact[bool] = Fact(True, "this test")
ACCEPTED, REJECTED = 24, 16
"""Of the 40 configurations that seed 0 draws for the example. A new feature draws others."""


@dataclass
class Variant:
    """A backend made of the example's: what it declares beside, its plan, and its parts."""

    spec: BackendSpec
    runtime: ModuleType

    def declaring(self, **facts: Any) -> Variant:
        served = {phase: replace(capabilities, **facts) for phase, capabilities in self.spec.capabilities.items()}
        return replace(self, spec=replace(self.spec, capabilities=served))

    def planning(self, **changes: Any) -> Variant:
        def plan(*arguments: Any) -> Any:
            outcome = self.spec.plan(*arguments)
            return replace(outcome, **changes) if isinstance(outcome, BackendPlan) else outcome

        return replace(self, spec=replace(self.spec, plan=plan))

    def running(self, impl: Any = None, builder: Any = None) -> Variant:
        members = {"impl_cls": impl, "builder_cls": builder}
        given = {name: part for name, part in members.items() if part is not None}
        backend = type("Backend", (self.spec.get_class(),), given)
        return replace(self, spec=replace(self.spec, load=load_path_of(backend)))

    def suite(self, **attributes: Any) -> type[BackendConformance]:
        settings = {"spec": self.spec, "num_configs": 40, "heads": HEADS, **attributes}
        return type("TestVariant", (BackendConformance,), settings)


def params_of(suite: type[BackendConformance], *, grouped: bool) -> list[Any]:
    """Return what the suite gives to pytest as parameters, with pytest-xdist or without."""
    found: list[Any] = []
    plugins = SimpleNamespace(get_plugin=lambda name: SimpleNamespace(suites={}), hasplugin=lambda name: grouped)
    metafunc: Any = SimpleNamespace(
        fixturenames=["index"],
        parametrize=lambda name, values: found.extend(values),
        config=SimpleNamespace(pluginmanager=plugins),
    )
    suite().pytest_generate_tests(metafunc)
    return found


def ids_of(suite: type[BackendConformance]) -> list[Any]:
    """Return the configurations that pytest would make tests of their own, or the reason of their one skip."""
    found = params_of(suite, grouped=False)
    return [mark.kwargs["reason"] for each in found for mark in each.marks] if found[0] not in range(1000) else found


def failures(suite: type[BackendConformance], until: str | None = None) -> list[str]:
    """Run a suite as pytest would, to its end or to a failure that says ``until``; return what each failing test says,
    notes included."""
    suite.setup_class()
    try:
        found = []
        tests = [partial(suite().test_config, index) for index in ids_of(suite) if type(index) is int]
        first = (suite().test_spec_is_sound, suite().test_what_is_declared_is_accepted)
        for test in (*first, *tests, suite().test_configs_that_are_not_run):
            try:
                test()
            except pytest.skip.Exception:
                continue
            except Exception as error:
                found.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
                if until is not None and until in found[-1]:
                    break
        return found
    finally:
        suite.teardown_class()
