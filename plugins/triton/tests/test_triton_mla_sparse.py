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
from attn_select_triton.kernels.chosen_slots import rows_of_pages, slots_in_front  # noqa: E402
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
        return int(group.backends["decode"].builder.build(0, common).parts[0].num_splits)

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
        ({"dtype": "float16"}, "h100", True),
        ({"num_heads": 32}, "h100", True),
        ({"num_heads": 128}, "h100", True),
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
    assert isinstance(plan.kernel, MLASparseKernel)
    assert plan.kernel.gluon == gluon


@pytest.mark.parametrize(
    ("fields", "where", "mib"),
    [
        ({}, "h100", 256),
        ({"kv_cache_dtype": "fp8_e5m2"}, "h100", 256),
        ({"batch_invariant": True}, "h100", 0),
        ({"decode_context_parallel_size": 2}, "h100", 0),
        ({"kv_lora_rank": 384}, "h100", 0),
        ({"qk_rope_head_dim": 0}, "h100", 256),
        ({"qk_rope_head_dim": 0, "kv_cache_dtype": "auto"}, "h100", 0),
        ({"qk_rope_head_dim": 0, "kv_cache_dtype": "auto", "num_heads": 32}, "h100", 256),
        ({"qk_rope_head_dim": 32}, "h100", 0),
        ({}, "b200", 0),
    ],
    ids=str,
)
def test_where_prefills_copy_latents(fields: dict[str, Any], where: str, mib: int) -> None:
    given = {"num_heads": 16, "sparse_top_k": 2048, "kv_cache_dtype": "fp8_e4m3", **DEEPSEEK, **fields}
    config = AttentionConfig(**given)
    plans = {phase: plan_of(TRITON_MLA_SPARSE, config, where, phase=phase) for phase in config.phases}
    assert plans["prefill"].kernel == MLASparseKernel(False, mib << 20)
    assert plans["decode"].kernel == MLASparseKernel(False, 0)
    assert plans["prefill"].workspace_bytes - plans["decode"].workspace_bytes == mib << 20


MIXED = [(1, 900), (1, 30), (0, 40), (600, 700), (500, 900), (3, 2000)]


def parts_of(group: Any, requests: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return the tokens of each launch, and the rows that are copied before it."""
    call = group.backends["prefill"].builder.build(0, common_of(problem_for(group, requests)))
    return [(part.first, part.last, 0 if part.gather is None else len(part.gather.latents)) for part in call.parts]


def copying_group(monkeypatch: pytest.MonkeyPatch, mib: int = 256, **fields: Any) -> Any:
    monkeypatch.setattr(triton_mla_sparse, "COPIES_NS", 0.0)
    given = {"num_heads": 16, "sparse_top_k": 512, "kv_cache_dtype": "fp8_e4m3", "dtype": "bfloat16", **DEEPSEEK}
    config = AttentionConfig(**{**given, **fields})
    if not ON_GPU:
        monkeypatch.setattr(triton_mla_sparse, "capability_of", lambda device: (9, 0))
        monkeypatch.setattr(triton_mla_sparse, "sm_count", lambda device: 132)
    options = {"options": {"gather_workspace_mib": mib}}
    return attention_group(selection_of(TRITON_MLA_SPARSE, config, "h200", **options), DEVICE, Capacity(8, 2048, 4096))


def test_prefills_copy_latents_where_that_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    group = copying_group(monkeypatch)
    assert parts_of(group, MIXED) == [(0, 2, 0), (2, 1105, 704 + 960 + 2048)]  # in whole pages of 64 tokens
    assert parts_of(group, [(600, 700)]) == [(0, 600, 704)]
    assert parts_of(group, [(1, 900)] * 4) == [(0, 4, 0)]
    assert parts_of(group, [(2, 4000)]) == [(0, 2, 0)]  # the copy of 4000 latents would take longer
    room = copying_group(monkeypatch, mib=1)  # of 910 latents
    assert parts_of(room, MIXED) == [(0, 2, 0), (2, 602, 704), (602, 1105, 0)]
    assert parts_of(copying_group(monkeypatch, mib=0), MIXED) == [(0, 1105, 0)]


def test_slots_follow_the_pages_that_were_copied(device: torch.device) -> None:
    """Of pages that two requests share, either copy serves: both are whole, whatever the first one's length is."""
    table = torch.tensor([[2, 7, -1], [2, 3, 9]], dtype=torch.int32, device=device)
    start_loc = torch.tensor([0, 128, 320], dtype=torch.int32, device=device)
    pages = rows_of_pages(table, start_loc, 12, 64).tolist()
    assert [pages[page] for page in (7, 3, 9)] == [64, 192, 256]
    assert pages[2] in (0, 128)
    slots = torch.tensor([[-1, 7 * 64 + 5, 9 * 64 + 61, -1], [3 * 64, -1, -1, -1]], dtype=torch.int32, device=device)
    pages_tensor = torch.tensor(pages, dtype=torch.int32, device=device)
    front, counts = slots_in_front(slots, pages_tensor, 64)
    assert counts.tolist() == [2, 1]
    assert front[0, :2].tolist() == [69, 256 + 61]
    assert front[1, 0].item() == 192


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [256, 1])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_heads": 128, "dtype": "float16"},
        {"num_heads": 40, "kv_cache_dtype": "fp8_e5m2", "block_size": 64},
        {"qk_rope_head_dim": 0},
        {"qk_rope_head_dim": 0, "num_heads": 64, "kv_cache_dtype": "auto"},
    ],
    ids=str,
)
def test_latents_that_were_copied(fields: dict[str, Any], mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = copying_group(monkeypatch, mib, **fields)
    for requests in (MIXED, [(600, 700)], [(5, 1500), (700, 700)]):
        assert any(rows for _, _, rows in parts_of(group, requests))
        problem = problem_for(group, requests)
        check_result(group, problem, run_problem(group, problem))


@pytest.mark.parametrize("dims", [{"kv_lora_rank": 520}, {"kv_lora_rank": 40}, {"qk_rope_head_dim": 8}], ids=str)
def test_sizes_that_no_kernel_takes(dims: dict[str, int]) -> None:
    config = AttentionConfig(**{"num_heads": 16, "sparse_top_k": 2048, **DEEPSEEK, **dims})
    assert "mla-dims" in codes_of(TRITON_MLA_SPARSE, config, "h100")


@pytest.mark.skipif(ON_GPU, reason="the kernel may run here")
def test_a_kernel_for_another_device_is_refused() -> None:
    config = AttentionConfig(num_heads=16, sparse_top_k=2048, dtype=DTYPE, **DEEPSEEK)
    with pytest.raises(KernelMismatchError, match="written in Gluon for Hopper"):
        attention_group(selection_of(TRITON_MLA_SPARSE, config, "h100"), "cpu", Capacity(4, 64, 512))
