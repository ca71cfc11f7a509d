"""The backend runs what its spec promises, on emulated kernels of every provider."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

from attn_select.environment import Environment
from attn_select_cutlass_mla.cutlass_mla import CUTLASS_MLA
from attn_select_cutlass_mla.providers import FLASHINFER, PROVIDERS

pytest.importorskip("torch")

from attn_select.testing import BackendConformance


class Emulated(BackendConformance):
    """On the CPU, for a B200."""

    spec = CUTLASS_MLA
    device = "cpu"
    gate_device = "b200"
    environment = Environment(assume_installed=True, variables={})
    num_configs: ClassVar[int] = 40
    heads = ((1, 1), (4, 4), (128, 128))
    provider: ClassVar[str] = "vllm"

    @pytest.fixture(autouse=True)
    def kernels(self, emulate: Callable[[str], list[dict[str, Any]]]) -> None:
        emulate(self.provider)


class TestVllm(Emulated):
    options: ClassVar[Mapping[str, Any]] = {"provider": "vllm"}


class TestSglKernel(Emulated):
    provider = "sgl-kernel"
    options: ClassVar[Mapping[str, Any]] = {"provider": "sgl-kernel"}
    num_configs = 25


class TestFlashInfer(Emulated):
    provider = FLASHINFER.distribution
    options: ClassVar[Mapping[str, Any]] = {"provider": "flashinfer-python"}
    num_configs = 25


def test_every_provider_is_held_to_the_spec() -> None:
    suites = (TestVllm, TestSglKernel, TestFlashInfer)
    assert [suite.provider for suite in suites] == [provider.library.distribution for provider in PROVIDERS]
