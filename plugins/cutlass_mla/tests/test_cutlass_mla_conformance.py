"""The backend runs what its spec promises, on emulated kernels of every build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from attn_select.testing import BackendConformance, environment_of
from attn_select_cutlass_mla.facts.builds import BUILDS
from attn_select_cutlass_mla.facts.cutlass_mla import CUTLASS_MLA


class Emulated(BackendConformance):
    """On the CPU, for a B200."""

    spec = CUTLASS_MLA
    device = "cpu"
    gate_device = "b200"
    environment = environment_of()
    heads = ((1, 1), (4, 4), (128, 128))

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[[str], list[dict[str, Any]]]) -> None:
        emulate(self.options["provider"])


class TestVllm(Emulated):
    options: ClassVar[Mapping[str, Any]] = {"provider": "vllm"}
    num_configs = 40


class AnotherBuild(Emulated):
    """The same kernel from another distribution: only what the adapter passes differs."""

    num_configs = 10


class TestSglKernel(AnotherBuild):
    options: ClassVar[Mapping[str, Any]] = {"provider": "sgl-kernel"}


class TestFlashInfer(AnotherBuild):
    options: ClassVar[Mapping[str, Any]] = {"provider": "flashinfer-python"}


def test_every_build_is_held_to_the_spec() -> None:
    suites = (TestVllm, TestSglKernel, TestFlashInfer)
    assert [suite.options["provider"] for suite in suites] == [build.distribution for build in BUILDS]
