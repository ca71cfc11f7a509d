"""``TORCH_STATE`` runs what its spec promises, on a CPU and, where there is one, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attn_select.testing import load_path_of
from attn_select.testing.state_conformance import StateConformance
from attn_select_torch.facts.torch_state import TORCH_STATE


class TestTorchState(StateConformance):
    spec = TORCH_STATE


@pytest.mark.gpu
class TestTorchStateOnGpu(StateConformance):
    spec = TORCH_STATE
    device = "cuda"


def test_a_kernel_that_changes_its_inputs_is_found() -> None:
    backend: Any = TORCH_STATE.get_class()

    class Scales(backend.impl_cls):  # type: ignore[misc]
        def forward(self, phase: Any, query: Any, *rest: Any) -> None:
            super().forward(phase, query, *rest)
            query *= 2

    made = type("Backend", (backend,), {"impl_cls": Scales})
    members = {"spec": replace(TORCH_STATE, load=load_path_of(made))}
    suite: Any = type("TestScales", (StateConformance,), members)()
    found = []
    for index in range(6):
        try:
            suite.test_results(index)
        except AssertionError as error:
            found.append(str(error))
    assert "channels was changed: it is the caller's" in found
