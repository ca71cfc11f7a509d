"""Both backends run what their specs promise: on emulated kernels anywhere, on the real ones where there is a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from attn_select.environment import Environment, installed_version
from attn_select_flashmla.flashmla import FLASHMLA
from attn_select_flashmla.flashmla_sparse import FLASHMLA_SPARSE
from attn_select_flashmla.providers import KERNELS

pytest.importorskip("torch")


from attn_select.testing import BackendConformance


class Emulated(BackendConformance):
    """On the CPU, for an H100, on an emulated build."""

    device = "cpu"
    gate_device = "h100"
    environment = Environment(assume_installed=True, pins={"vllm": "0.26.0"})
    num_configs: ClassVar[int] = 40
    heads = ((1, 1), (4, 4), (40, 40))
    provider: ClassVar[str] = "vllm"

    @pytest.fixture(autouse=True)
    def build(self, emulate: Callable[[str], list[str]]) -> None:
        emulate(self.provider)

    @classmethod
    def of(cls, provider: str) -> dict[str, Any]:
        """Return the attributes of a suite of another build; few configurations, since only the calls differ."""
        return {"provider": provider, "options": {"provider": provider}, "num_configs": 15}


class TestEmulatedDense(Emulated):
    spec = FLASHMLA


class TestEmulatedSparse(Emulated):
    spec = FLASHMLA_SPARSE


for _kernel in KERNELS[1:]:
    for _suite in (TestEmulatedDense, TestEmulatedSparse):
        _name = f"{_suite.__name__}_{_kernel.library.distribution.replace('-', '_')}"
        globals()[_name] = type(_name, (_suite,), {**Emulated.of(_kernel.library.distribution), "__module__": __name__})


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
