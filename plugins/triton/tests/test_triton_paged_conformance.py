"""PAGED_ATTENTION runs what its spec promises: small configurations in Triton's interpreter, many on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.backends.spec import BackendPlan, BackendSpec, Fact, Reason
from attn_select.testing import BackendConformance
from attn_select_triton.facts.paged_attention import PAGED_ATTENTION
from attn_select_triton.facts.planned_kernels import ClassicDecodeKernel


def interpretable(spec: BackendSpec) -> BackendSpec:
    """Return the spec without bfloat16: the interpreter multiplies its bits as if they were integers."""
    dtypes = Fact(("float16", "float32"), "Triton's interpreter")
    return replace(spec, capabilities={p: replace(c, dtypes=dtypes) for p, c in spec.capabilities.items()})


# Batches of the suite are short and few: by the rule they run in version 1, and what graphs capture in version 2.


def with_decode(spec: BackendSpec, **changes: int) -> BackendSpec:
    """Return the spec, with another rule for its versions in the kernel of its decode plans."""

    def plan(*arguments: Any) -> BackendPlan | list[Reason]:
        found = spec.plan(*arguments)
        if isinstance(found, BackendPlan) and isinstance(found.kernel, ClassicDecodeKernel):
            return replace(found, kernel=replace(found.kernel, **changes))
        return found

    return replace(spec, plan=plan)


def version_1(spec: BackendSpec) -> BackendSpec:
    """Return the spec with every batch in version 1, unless a sequence is too long for it."""
    return with_decode(spec, v1_least_rows=0)


def version_2(spec: BackendSpec) -> BackendSpec:
    """Return the spec with every batch in version 2, whose partitions are so short that a sequence has two."""
    return with_decode(spec, v1_most_tokens=0, partition_size=64)


class Interpreted(BackendConformance):
    spec = interpretable(PAGED_ATTENTION)
    device = "cpu"
    gate_device = "h100"
    num_configs = 25
    heads = ((1, 1), (4, 2), (7, 1))

    @pytest.fixture(autouse=True)
    def without_a_gpu(self) -> None:
        if torch.cuda.is_available():
            pytest.skip("runs on the GPU")


class OnGpu(BackendConformance):
    spec = PAGED_ATTENTION
    num_configs = 160
    device = "cuda"


class TestByTheRule(Interpreted):
    pass


class TestVersion2(Interpreted):
    spec = version_2(Interpreted.spec)
    seed = 1


@pytest.mark.gpu
class TestByTheRuleOnGpu(OnGpu):
    pass


@pytest.mark.gpu
class TestVersion1OnGpu(OnGpu):
    """Its graphs too; head groups of 7, 16 and 71."""

    seed = 1
    num_configs = 60
    max_compile_keys = 8
    heads = ((14, 2), (32, 2), (71, 1))
    spec = version_1(PAGED_ATTENTION)


@pytest.mark.gpu
class TestVersion2OnGpu(OnGpu):
    """Eagerly too."""

    seed = 2
    num_configs = 60
    max_compile_keys = 8
    heads = ((4, 4), (8, 1), (14, 2))
    spec = version_2(PAGED_ATTENTION)
