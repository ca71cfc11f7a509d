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
    options: ClassVar[Mapping[str, Any]]

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[[str], list[str]]) -> None:
        emulate(self.options["provider"])


for _build in BUILDS:
    for _spec in (FLASHMLA, FLASHMLA_SPARSE):
        _name = f"Test_{_build.distribution.replace('-', '_')}_{_spec.name}"
        _given: dict[str, Any] = {"spec": _spec, "options": {"provider": _build.distribution}}
        if _build.distribution != "vllm":  # the same kernels: only what the adapter passes differs
            _given["num_configs"] = 10
        globals()[_name] = type(_name, (Emulated,), _given)


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
