"""Both backends run what their specs promise: on emulated kernels anywhere, on the real ones where there is a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")

from attn_select.machine.environment import Environment, installed_version
from attn_select.testing import BackendConformance, environment_of
from attn_select_flashmla.facts.builds import BUILDS
from attn_select_flashmla.facts.flashmla import FLASHMLA
from attn_select_flashmla.facts.flashmla_sparse import FLASHMLA_SPARSE


class Emulated(BackendConformance):
    """On the CPU, for an H100, on an emulated build."""

    device = "cpu"
    gate_device = "h100"
    environment = environment_of()
    num_configs = 40
    heads = ((1, 1), (4, 4), (40, 40))
    options: ClassVar[Mapping[str, Any]] = {"provider": "vllm"}

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[[str], list[str]]) -> None:
        emulate(self.options["provider"])


class TestEmulatedDense(Emulated):
    spec = FLASHMLA


class TestEmulatedSparse(Emulated):
    spec = FLASHMLA_SPARSE


class AnotherBuild(Emulated):
    """The same kernels from another distribution: only what the adapter passes differs."""

    num_configs = 10


class TestSglFlashMlaDense(AnotherBuild):
    spec = FLASHMLA
    options: ClassVar[Mapping[str, Any]] = {"provider": "sgl-flash-mla"}


class TestSglFlashMlaSparse(AnotherBuild):
    spec = FLASHMLA_SPARSE
    options: ClassVar[Mapping[str, Any]] = {"provider": "sgl-flash-mla"}


class TestSglangKernelDense(AnotherBuild):
    spec = FLASHMLA
    options: ClassVar[Mapping[str, Any]] = {"provider": "sglang-kernel"}


class TestSglangKernelSparse(AnotherBuild):
    spec = FLASHMLA_SPARSE
    options: ClassVar[Mapping[str, Any]] = {"provider": "sglang-kernel"}


class TestSglKernelDense(AnotherBuild):
    spec = FLASHMLA
    options: ClassVar[Mapping[str, Any]] = {"provider": "sgl-kernel"}


class TestSglKernelSparse(AnotherBuild):
    spec = FLASHMLA_SPARSE
    options: ClassVar[Mapping[str, Any]] = {"provider": "sgl-kernel"}


class TestUpstreamDense(AnotherBuild):
    spec = FLASHMLA
    options: ClassVar[Mapping[str, Any]] = {"provider": "flash-mla"}


class TestUpstreamSparse(AnotherBuild):
    spec = FLASHMLA_SPARSE
    options: ClassVar[Mapping[str, Any]] = {"provider": "flash-mla"}


def test_every_build_is_held_to_both_specs() -> None:
    held = {
        (suite.spec.name, suite.options["provider"])
        for suite in (Emulated, *_below(Emulated))
        if "spec" in suite.__dict__
    }
    assert held == {(spec.name, build.distribution) for spec in (FLASHMLA, FLASHMLA_SPARSE) for build in BUILDS}


def _below(suite: type[Emulated]) -> list[type[Emulated]]:
    return [each for direct in suite.__subclasses__() for each in (direct, *_below(direct))]


def built() -> Environment | None:
    """Return the machine's libraries. vLLM's kernels without its metadata count as 0.26.0's."""
    bare = importlib.util.find_spec("vllm") is not None and installed_version("vllm") is None
    return Environment(pins={"vllm": "0.26.0"}) if bare else None


HEADS = ((1, 1), (4, 4), (14, 2), (16, 16), (40, 40), (128, 128))


class OnGpu(BackendConformance):
    """On the GPU of the machine, with the build that is there."""

    heads = HEADS
    num_configs: ClassVar[int] = 100
    environment = built()
    device = "cuda"


@pytest.mark.gpu
class TestDense(OnGpu):
    spec = FLASHMLA


@pytest.mark.gpu
class TestSparse(OnGpu):
    spec = FLASHMLA_SPARSE
