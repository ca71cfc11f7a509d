"""PAGED_ATTENTION runs what its spec promises: small configurations in Triton's interpreter, many on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import ClassVar

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.spec import BackendSpec, Fact
from attn_select.testing import BackendConformance
from attn_select_triton import paged_attention, paged_runtime
from attn_select_triton.paged_attention import PAGED_ATTENTION


def interpretable(spec: BackendSpec) -> BackendSpec:
    """Return the spec without bfloat16: the interpreter multiplies its bits as if they were integers."""
    dtypes = Fact(("float16", "float32"), "Triton's interpreter")
    return replace(spec, capabilities={p: replace(c, dtypes=dtypes) for p, c in spec.capabilities.items()})


# Batches of the suite are short and few: by the rule they run in version 1, and what graphs capture in version 2.
VERSION_1 = {"V1_LEAST_ROWS": 0}
VERSION_2 = {"V1_MOST_TOKENS": 0, "PARTITION_SIZE": 64}
"""Constants that bring every batch to one version, with partitions short enough that a sequence has two."""


class Suite(BackendConformance):
    nan_tail_safe = True
    constants: ClassVar[dict[str, int]] = {}

    @pytest.fixture(autouse=True)
    def one_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module, (name, number) in itertools.product((paged_attention, paged_runtime), self.constants.items()):
            monkeypatch.setattr(module, name, number)


class Interpreted(Suite):
    spec = interpretable(PAGED_ATTENTION)
    device = "cpu"
    gate_device = "h100"
    num_configs = 25
    heads = ((1, 1), (4, 2), (7, 1))

    @pytest.fixture(autouse=True)
    def without_a_gpu(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("runs on the GPU")


class OnGpu(Suite):
    spec = PAGED_ATTENTION
    num_configs = 160

    @pytest.fixture(autouse=True)
    def on_a_gpu(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.mark.slow
class TestByTheRule(Interpreted):
    pass


@pytest.mark.slow
class TestVersion2(Interpreted):
    seed = 1
    constants = VERSION_2


@pytest.mark.gpu
@pytest.mark.slow
class TestByTheRuleOnGpu(OnGpu):
    pass


@pytest.mark.gpu
@pytest.mark.slow
class TestVersion1OnGpu(OnGpu):
    """Its graphs too; head groups of 7, 16 and 71."""

    seed = 1
    num_configs = 60
    max_compile_keys = 8
    heads = ((14, 2), (32, 2), (71, 1))
    constants = VERSION_1


@pytest.mark.gpu
@pytest.mark.slow
class TestVersion2OnGpu(OnGpu):
    """Eagerly too."""

    seed = 2
    num_configs = 60
    max_compile_keys = 8
    heads = ((4, 4), (8, 1), (14, 2))
    constants = VERSION_2
