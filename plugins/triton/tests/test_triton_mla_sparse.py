"""TRITON_MLA_SPARSE runs what its spec promises, and which kernel it plans where."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from test_triton_mla_conformance import interpretable  # noqa: E402
from triton_mla_layers import DEEPSEEK, DEVICE, DTYPE, ON_GPU, SMALL, WITHOUT_GLUON  # noqa: E402

from attn_select import AttentionConfig, select  # noqa: E402
from attn_select.errors import KernelMismatchError  # noqa: E402
from attn_select.reference.running import check_result, common_of, problem_for, run_problem  # noqa: E402
from attn_select.runtime import Capacity, attention_group  # noqa: E402
from attn_select.testing import BackendConformance, codes_of, plan_of, selection_of  # noqa: E402
from attn_select_triton.facts.planned_kernels import MLASparseKernel  # noqa: E402
from attn_select_triton.facts.triton_mla_sparse import TRITON_MLA_SPARSE  # noqa: E402
from attn_select_triton.runtime import triton_mla_sparse  # noqa: E402


class TestInterpreted(BackendConformance):
    """For another GPU than Hopper: the interpreter runs no Gluon."""

    spec = interpretable(TRITON_MLA_SPARSE)
    device = "cpu"
    gate_device = WITHOUT_GLUON
    num_configs = 16
    heads = ((1, 1), (3, 3))

    @pytest.fixture(autouse=True)
    def interpreter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if torch.cuda.is_available():
            pytest.skip("runs on the GPU")
        monkeypatch.setattr(triton_mla_sparse, "sm_count", lambda device: 24)  # as one, no keys are split


class OnGpu(BackendConformance):
    """On the GPU of the machine."""

    spec = TRITON_MLA_SPARSE
    num_configs: ClassVar[int] = 80
    device = "cuda"


@pytest.mark.gpu
class TestFewHeads(OnGpu):
    heads = ((1, 1), (8, 8), (16, 16), (24, 24), (32, 32))


@pytest.mark.gpu
class TestManyHeads(OnGpu):
    seed = 1
    heads = ((20, 20), (64, 64), (128, 128))


def group_of(**fields: Any) -> Any:
    config = AttentionConfig(**{"num_heads": 3, "dtype": DTYPE, "sparse_top_k": 40, **SMALL, **fields})
    if ON_GPU:
        selection = select(config, backend="TRITON_MLA_SPARSE")
    else:
        selection = selection_of(TRITON_MLA_SPARSE, config, WITHOUT_GLUON)
    return attention_group(selection, DEVICE, Capacity(8, 64, 512))


@pytest.mark.parametrize("fields", [{}, {"batch_invariant": True}, {"qk_rope_head_dim": 0}], ids=str)
def test_tokens_with_fewer_keys_than_are_kept(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(triton_mla_sparse, "sm_count", lambda device: 24)
    group = group_of(**fields)
    problem = problem_for(group, [(1, 300), (1, 7), (5, 40), (1, 0), (3, 42)])
    check_result(group, problem, run_problem(group, problem))


def test_keys_are_split_where_tokens_leave_multiprocessors_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mla_sparse, "sm_count", lambda device: 24)

    def splits(group: Any, tokens: int) -> int:
        common = common_of(problem_for(group, [(1, 300)] * tokens))
        return int(group.backends["decode"].builder.build(0, common).num_splits)

    wide = {"sparse_top_k": 1024}
    assert [splits(group_of(**wide), tokens) for tokens in (1, 8)] == [16, 3]
    assert splits(group_of(**wide, batch_invariant=True), 1) == 1


def test_padding_may_stand_between_slots(device: torch.device) -> None:
    """Behind the cache's end, and before its beginning, there is NaN."""
    group = group_of()
    problem = problem_for(group, [(1, 300), (1, 7), (5, 40), (1, 0), (3, 42)])
    chosen = problem.topk_indices
    chosen[::2] = chosen[::2].flip(1)
    chosen[1, :40:3] = -1
    chosen[2, ::2] = -1
    check_result(group, problem, run_problem(group, problem))


@pytest.mark.parametrize(
    ("fields", "where", "gluon"),
    [
        ({}, "h100", True),
        ({"num_heads": 32}, "h100", True),
        ({"num_heads": 128}, "h100", True),
        ({"kv_cache_dtype": "fp8_e4m3"}, "h100", False),
        ({"qk_rope_head_dim": 0}, "h100", False),
        ({"kv_lora_rank": 256}, "h100", True),
        ({"kv_lora_rank": 384}, "h100", False),
        ({}, "a100", False),
        ({}, "b200", False),
    ],
    ids=str,
)
def test_which_kernel_runs(fields: dict[str, Any], where: str, gluon: bool) -> None:
    config = AttentionConfig(**{"num_heads": 16, "sparse_top_k": 2048, **DEEPSEEK, **fields})
    plan = plan_of(TRITON_MLA_SPARSE, config, where)
    assert plan.kernel == MLASparseKernel(gluon)


@pytest.mark.parametrize("dims", [{"kv_lora_rank": 520}, {"kv_lora_rank": 40}, {"qk_rope_head_dim": 8}], ids=str)
def test_sizes_that_no_kernel_takes(dims: dict[str, int]) -> None:
    config = AttentionConfig(**{"num_heads": 16, "sparse_top_k": 2048, **DEEPSEEK, **dims})
    assert "mla-dims" in codes_of(TRITON_MLA_SPARSE, config, "h100")


@pytest.mark.skipif(ON_GPU, reason="the kernel may run here")
def test_a_kernel_for_another_device_is_refused() -> None:
    config = AttentionConfig(num_heads=16, sparse_top_k=2048, dtype=DTYPE, **DEEPSEEK)
    with pytest.raises(KernelMismatchError, match="written in Gluon for Hopper"):
        attention_group(selection_of(TRITON_MLA_SPARSE, config, "h100"), "cpu", Capacity(4, 64, 512))
