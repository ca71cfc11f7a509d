"""TRITON_MLA runs what its spec promises: small configurations in Triton's interpreter, many on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton_mla_layers import WITHOUT_GLUON  # noqa: E402

from attn_select.backends.spec import BackendSpec, Fact  # noqa: E402
from attn_select.testing import BackendConformance  # noqa: E402
from attn_select_triton.facts.triton_mla import TRITON_MLA  # noqa: E402
from attn_select_triton.runtime import triton_mla  # noqa: E402


def interpretable(spec: BackendSpec) -> BackendSpec:
    """Return the spec in float16 alone: the interpreter multiplies the bits of bfloat16 as if they were integers."""
    dtypes = Fact(("float16",), "Triton's interpreter")
    return replace(spec, capabilities={p: replace(c, dtypes=dtypes) for p, c in spec.capabilities.items()})


class TestInterpreted(BackendConformance):
    """For another GPU than Hopper: the interpreter runs no Gluon."""

    spec = interpretable(TRITON_MLA)
    device = "cpu"
    gate_device = WITHOUT_GLUON
    num_configs = 28
    heads = ((1, 1), (3, 3))

    @pytest.fixture(autouse=True)
    def interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if torch.cuda.is_available():
            pytest.skip("runs on the GPU")
        monkeypatch.setattr(triton_mla, "sm_count", lambda device: 24)  # as one, no keys are split


class OnGpu(BackendConformance):
    """On the GPU of the machine."""

    spec = TRITON_MLA
    num_configs: ClassVar[int] = 80
    device = "cuda"


@pytest.mark.gpu
class TestFewHeads(OnGpu):
    heads = ((1, 1), (4, 4), (16, 16))


@pytest.mark.gpu
class TestManyHeads(OnGpu):
    seed = 1
    heads = ((20, 20), (64, 64), (128, 128))


@pytest.mark.gpu
class TestOddHeads(OnGpu):
    seed = 2
    heads = ((7, 7), (71, 71), (192, 192))
    num_configs = 40
