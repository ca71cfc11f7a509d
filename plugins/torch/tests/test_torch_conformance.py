"""The torch backends run what their specs promise, on a CPU and, where there is one, on a GPU."""

from __future__ import annotations

import pytest

from attn_select.testing import BackendConformance
from attn_select_torch.facts.flex_attention import FLEX_ATTENTION
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_mla_sparse import TORCH_MLA_SPARSE
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA


class TestTorchSdpa(BackendConformance):
    spec = TORCH_SDPA
    device = "cpu"


class TestTorchMla(BackendConformance):
    spec = TORCH_MLA
    device = "cpu"


class TestTorchMlaSparse(BackendConformance):
    spec = TORCH_MLA_SPARSE
    device = "cpu"


class TestFlexAttention(BackendConformance):
    spec = FLEX_ATTENTION
    device = "cpu"
    max_compile_keys = 2  # each compiles for seconds


class OnGpu:
    device = "cuda"


@pytest.mark.gpu
class TestTorchSdpaOnGpu(OnGpu, TestTorchSdpa):
    pass


@pytest.mark.gpu
class TestTorchMlaOnGpu(OnGpu, TestTorchMla):
    pass


@pytest.mark.gpu
class TestTorchMlaSparseOnGpu(OnGpu, TestTorchMlaSparse):
    pass


@pytest.mark.gpu
class TestFlexAttentionOnGpu(OnGpu, TestFlexAttention):
    max_compile_keys = 8
