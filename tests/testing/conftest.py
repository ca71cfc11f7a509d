"""The backends that the tests of the conformance suite start from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conformance_variants import YES, Variant
from torch import Tensor

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme_attention"


@pytest.fixture(scope="module")
def acme() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The documented example plugin: facts and runtime."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        yield importlib.import_module("acme_attention"), importlib.import_module("acme_runtime")
        for name in ("acme_attention", "acme_runtime"):
            del sys.modules[name]


@pytest.fixture
def right(acme: tuple[ModuleType, ModuleType]) -> Variant:
    """The example, and what is easily added to it: sinks, batch invariance and requests of their own size."""
    facts, runtime = acme

    class WithSinks(runtime.AcmeImpl):  # type: ignore[name-defined, misc]
        def attend(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
            output, lse = super().attend(query, keys, values, window)
            if self.terms.sinks is None:
                return output, lse
            whole = torch.logaddexp(lse, self.terms.sinks.float())
            return output * torch.exp(lse - whole).unsqueeze(-1), whole

    return Variant(facts.ACME_ATTN, runtime).declaring(sinks=YES, batch_invariant=YES).running(WithSinks)
