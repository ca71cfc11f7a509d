"""FLASHINFER_MLA and FLASHINFER_MLA_SPARSE run what their specs promise: emulated anywhere, the real ones on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.mla import FLASHINFER_MLA
from attn_select_flashinfer.facts.mla_cute_dsl import FLASHINFER_MLA_CUTE_DSL
from attn_select_flashinfer.facts.mla_sparse import FLASHINFER_MLA_SPARSE

pytest.importorskip("torch")


from attn_select.testing import BackendConformance

HEADS = ((1, 1), (4, 4), (16, 16), (20, 20), (40, 40))
FA2 = {"decode_kernel": "fa2", "prefill_kernel": "fa2"}


class Emulated(BackendConformance):
    """On the CPU, for one GPU, on emulated kernels of 0.6.14, or of another release."""

    device = "cpu"
    environment = Environment(assume_installed=True, pins={"flashinfer-python": "0.6.14"})
    num_configs: ClassVar[int] = 40
    heads = HEADS
    capability: ClassVar[tuple[int, int]] = (9, 0)
    release: ClassVar[str] = "0.6.14"

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[..., Any]) -> None:
        emulate(self.capability, release=self.release)


NEWEST = {
    "release": "0.7.2.post1",
    "environment": Environment(assume_installed=True, pins={"flashinfer-python": "0.7.2.post1"}),
}
H100: dict[str, Any] = {"gate_device": "h100"}
B200: dict[str, Any] = {"gate_device": "b200", "capability": (10, 0)}
SUITES: dict[str, tuple[BackendSpec, dict[str, Any]]] = {
    "TestOnH100": (FLASHINFER_MLA, H100),
    # The wrapper since 0.7, which plans from other lists.
    "TestNewestOnH100": (FLASHINFER_MLA, {**H100, **NEWEST, "num_configs": 15}),
    "TestFa2OnH100": (FLASHINFER_MLA, {**H100, "num_configs": 15, "options": FA2}),
    "TestOnB200": (FLASHINFER_MLA, {**B200, "num_configs": 20}),
    "TestCutlassOnB200": (FLASHINFER_MLA, {**B200, "num_configs": 10, "options": {"prefill_kernel": "cutlass"}}),
    # Nothing is compiled here.
    "TestCuteDslOnB200": (FLASHINFER_MLA_CUTE_DSL, {**B200, "num_configs": 60, "max_compile_keys": 60}),
    "TestOn5090": (FLASHINFER_MLA, {"gate_device": "rtx5090", "capability": (12, 0), "num_configs": 15}),
    "TestSparseOnB200": (FLASHINFER_MLA_SPARSE, B200),
    "TestSparseOnH100": (FLASHINFER_MLA_SPARSE, {**H100, **NEWEST}),
}
for _name, (_spec, _given) in SUITES.items():
    globals()[_name] = type(_name, (Emulated,), {"spec": _spec, **_given})


class OnGpu(BackendConformance):
    """On the GPU of the machine, with the FlashInfer that is there."""

    spec = FLASHINFER_MLA
    num_configs: ClassVar[int] = 120
    heads = (*HEADS, (128, 128))
    max_compile_keys = 100
    """Keys that differ in the page alone share a module but for XQA."""
    device = "cuda"


@pytest.mark.gpu
class TestOwnKernels(OnGpu):
    """What the plan chooses: fa3 on Hopper."""


@pytest.mark.gpu
class TestFa2(OnGpu):
    options: ClassVar[dict[str, Any]] = FA2


@pytest.mark.gpu
class TestSparse(OnGpu):
    """What the plan chooses: fa3 on Hopper."""

    spec = FLASHINFER_MLA_SPARSE
