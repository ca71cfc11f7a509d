"""``MLAAttention`` against float64: both computation paths, chunked context, caches of every kind, sparse layers."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_select import AttentionConfig, select
from attn_select.config import Phase
from attn_select.errors import ConfigError, PluginError
from attn_select.layouts import FP8_DS_MLA, MLA
from attn_select.runtime import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BatchError,
    CommonAttentionMetadata,
    MLAAttention,
    MLAAttentionGroup,
    MLAAttentionImpl,
    MLAMetadata,
    Scales,
    attention_group,
    forward_context,
    ops,
)
from attn_select.runtime.backend import AttentionLayer
from attn_select.runtime.kv_cache import in_blocks_of
from attn_select.selection import Selection
from attn_select.spec import BackendPlan, BackendSpec
from attn_select.testing import (
    MLAProblem,
    error_bound,
    lse_error,
    random_mla_problem,
    random_problem,
    relative_error,
    same_bits,
    sparse_mla_reference,
)
from attn_select.testing.running import common_of
from attn_select_torch.facts.torch_mla import TORCH_MLA

SMALL = {"num_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
DEEPSEEK = {"num_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MIXED = ((1, 1), (1, 40), (1, 16), (20, 20), (5, 69), (16, 48), (2, 2), (30, 35))
"""Decodes with and without context, then prefills: whole, with 64 cached tokens, with 32, whole, with 5."""
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 20},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "soft cap": {"logits_soft_cap": 3.0},
    "images": {"mm_prefix": True, "sliding_window": 4},
    "non-causal": {"non_causal": True, "sliding_window": 9},
    "all": {"sinks": True, "alibi": True, "logits_soft_cap": 4.0, "mm_prefix": True, "sliding_window": 11},
}
PADDING = 3
Choose = Callable[..., Selection]


@dataclasses.dataclass
class Ran:
    """A step that was run, and what it ran on."""

    problem: MLAProblem
    group: MLAAttentionGroup
    layer: MLAAttention
    metadata: MLAMetadata
    kv_cache: Tensor
    output: Tensor
    lse: Tensor | None

    @property
    def tokens(self) -> int:
        return len(self.problem.query)

    def check(self) -> None:
        """Compare output, LSE and cache with the oracle, and see that padding was left alone."""
        problem, step, cache = self.problem, self.problem.step, self.kv_cache
        assert step.kv_cache is not None
        assert same_bits(cache.view(step.kv_cache.shape), step.written_cache())
        output, lse = problem.reference()
        bound = error_bound(step.config, self.group.selection.plans)
        error = relative_error(self.output[: self.tokens], output)
        assert error.norm <= bound.norm, (error, bound)
        assert error.row <= bound.row, (error, bound)
        assert self.output[self.tokens :].isnan().all()
        if self.lse is not None:
            assert lse_error(self.lse[: self.tokens], lse) <= bound.lse
            assert self.lse[self.tokens :].isnan().all()


def padded(tensor: Tensor) -> Tensor:
    """Add rows of NaN that no kernel may read."""
    return torch.cat([tensor, tensor.new_full((PADDING, *tensor.shape[1:]), torch.nan)])


def layer_of(group: MLAAttentionGroup, problem: MLAProblem, **options: Any) -> MLAAttention:
    step = problem.step
    scales = None
    if step.k_scale is not None and step.q_scale is not None:
        heads = 1 if step.config.per_head_quant_scales else 0
        scales = Scales.make("cpu", q=step.q_scale, k=step.k_scale, num_kv_heads=heads)
    return MLAAttention(
        group, problem.kv_b_proj, alibi_slopes=step.alibi_slopes, sinks=step.sinks, scales=scales, **options
    )


def run(
    problem: MLAProblem,
    common: CommonAttentionMetadata,
    *,
    selection: Selection | None = None,
    wants_lse: bool = True,
    **options: Any,
) -> Ran:
    """Run one step with every check on; ``options`` are the group's."""
    step = problem.step
    group = MLAAttentionGroup(selection or select(step.config, device="cpu", backend="TORCH_MLA"), **options)
    group.checked = True
    layer, metadata = layer_of(group, problem), group.build(common)
    assert step.kv_cache is not None
    assert step.layout is not None
    assert group.kernel_block_size is not None
    cache = in_blocks_of(group.kernel_block_size, step.kv_cache.clone(), step.layout, step.config)
    config, rows = step.config, len(problem.query) + PADDING
    output = torch.full((rows, config.num_heads, config.v_head_dim or 0), torch.nan, dtype=problem.query.dtype)
    lse = torch.full((rows, config.num_heads), torch.nan) if wants_lse else None
    chosen = None
    if step.topk_indices is not None:
        chosen = torch.cat([step.topk_indices, torch.full_like(step.topk_indices[:PADDING], 2**30)])
    given = (padded(problem.query), padded(step.key), padded(step.value), cache, metadata, output, chosen, lse)
    assert layer(*given) is output
    return Ran(problem, group, layer, metadata, cache, output, lse)


@pytest.fixture
def run_config() -> Callable[..., Ran]:
    """Return ``run_config(config, requests, **options)``: draw a step, run it, compare it with the oracle."""

    def go(config: AttentionConfig, requests: Sequence[tuple[int, int]], seed: int = 0, **options: Any) -> Ran:
        problem = random_mla_problem(seed, config, requests=requests)
        ran = run(problem, common_of(problem), **options)
        ran.check()
        return ran

    return go


@pytest.mark.parametrize("workspace", [1, 5, 16, 32, 100, 101, 8192])
@pytest.mark.parametrize("name", EXTRAS)
def test_context_in_chunks(name: str, workspace: int, run_config: Callable[..., Ran]) -> None:
    config = AttentionConfig(**SMALL, dtype="float32", **EXTRAS[name])
    ran = run_config(config, MIXED, workspace_tokens=workspace)
    (decode, prefill), window = ran.metadata.parts, config.sliding_window
    assert (decode.phase, prefill.phase, ran.metadata.num_decode_tokens) == ("decode", "prefill", 3)
    contexts = [64, 32, 5]
    if window is not None and not config.mm_prefix:
        contexts = [min(context, window - 1) for context in contexts]
    if not config.mm_prefix:
        assert len(prefill.chunks) == math.ceil(sum(contexts) / workspace)
    assert all(chunk.num_tokens <= workspace for chunk in prefill.chunks)


@given(
    seed=st.integers(0, 2**20),
    extras=st.sampled_from(list(EXTRAS)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    cache=st.sampled_from(["auto", "auto", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float32"]),
    block_size=st.sampled_from([1, 7, 16, 48, 64]),
    workspace=st.sampled_from([3, 16, 40, 8192]),
    speculative=st.sampled_from([0, 2]),
    wants_lse=st.booleans(),
)
def test_random_steps(
    seed: int,
    extras: str,
    dtype: str,
    cache: str,
    block_size: int,
    workspace: int,
    speculative: int,
    wants_lse: bool,
) -> None:
    config = AttentionConfig(
        **SMALL,
        **EXTRAS[extras],
        dtype=dtype,
        kv_cache_dtype=cache,
        block_size=block_size,
        num_speculative_tokens=speculative,
        per_head_quant_scales=cache.startswith("fp8") and seed % 2 == 0,
    )
    problem = random_mla_problem(seed, config)
    run(problem, common_of(problem), workspace_tokens=workspace, wants_lse=wants_lse).check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_deepseek_dimensions(dtype: str, cache: str, run_config: Callable[..., Ran]) -> None:
    config = AttentionConfig(**DEEPSEEK, dtype=dtype, kv_cache_dtype=cache)
    run_config(config, [(1, 130), (1, 17), (40, 40), (24, 150)], workspace_tokens=50)


@pytest.mark.parametrize(
    ("requests", "phases"),
    [([(1, 1), (1, 33)], ["decode"]), ([(8, 8), (9, 40)], ["prefill"]), ([(1, 20), (9, 9)], ["decode", "prefill"])],
)
def test_kinds_of_batches(requests: list[tuple[int, int]], phases: list[str], run_config: Callable[..., Ran]) -> None:
    ran = run_config(AttentionConfig(**SMALL), requests)
    assert [part.phase for part in ran.metadata.parts] == phases


def test_draft_tokens_are_decodes(run_config: Callable[..., Ran]) -> None:
    config = AttentionConfig(**SMALL, num_speculative_tokens=3, kv_cache_dtype="fp8_e4m3")
    ran = run_config(config, [(4, 4), (4, 50), (2, 33), (1, 9), (5, 21)])
    assert ran.metadata.num_decode_tokens == 11


@pytest.mark.parametrize(("block_size", "kernel"), [(64, 16), (48, 16), (16, 16), (24, 1)])
def test_blocks_of_the_allocator_are_split(block_size: int, kernel: int, run_config: Callable[..., Ran]) -> None:
    config = AttentionConfig(**SMALL, block_size=block_size)
    ran = run_config(config, MIXED, workspace_tokens=10)
    assert ran.group.kernel_block_size == kernel
    assert ran.group.allocate_kv_cache(3).shape == (3 * block_size // kernel, kernel, 40)


def test_rows_without_keys_are_zero() -> None:
    """As the padded requests of a CUDA graph: one query, no key, no slot."""
    problem = random_mla_problem(0, AttentionConfig(**SMALL), requests=[(1, 30), (1, 0), (1, 0)])
    ran = run(problem, common_of(problem))
    ran.check()
    assert ran.lse is not None
    assert (ran.output[1:3] == 0).all()
    assert ran.lse[1:3].isneginf().all()


def test_own_latents_are_not_rounded_to_the_cache() -> None:
    """A prefill attends to its own tokens as they are: what FP8 makes of them is far outside the bound."""
    problem = random_mla_problem(1, AttentionConfig(**SMALL, kv_cache_dtype="fp8_e5m2"), requests=[(30, 30)])
    ran = run(problem, common_of(problem))
    ran.check()
    as_decode, _ = problem.reference(1)
    bound = error_bound(problem.step.config, ran.group.selection.plans)
    assert relative_error(ran.output[:30], as_decode).norm > 2 * bound.norm


@pytest.mark.parametrize("name", EXTRAS)
def test_the_oracle_agrees_with_itself(name: str) -> None:
    """Without rounding in the cache, decodes (absorbed) and prefills (decompressed) are the same."""
    config = AttentionConfig(**SMALL, dtype="float32", num_speculative_tokens=1, **EXTRAS[name])
    problem = random_mla_problem(8, config)
    lengths = [query_len for query_len, _ in problem.step.requests]
    first_prefill = problem.num_decode_requests
    assert all(n <= 2 for n in lengths[:first_prefill])
    assert all(n > 2 for n in lengths[first_prefill:])
    expected = problem.reference()
    for decodes in (0, len(lengths)):
        torch.testing.assert_close(problem.to("cpu").reference(decodes), expected, rtol=1e-9, atol=1e-9)


def test_weights_are_kept_once() -> None:
    """Of the three forms only the transposed W_UV may be a copy, in bfloat16 on a CPU."""
    for dtype, copies in (("float32", 0), ("bfloat16", 1)):
        problem = random_mla_problem(0, AttentionConfig(**SMALL, dtype=dtype), requests=[(1, 1)])
        group = MLAAttentionGroup(select(problem.step.config, device="cpu", backend="TORCH_MLA"))
        layer = layer_of(group, problem)
        places = {tensor.untyped_storage().data_ptr() for tensor in (layer.kv_b_proj, layer.w_uk_t, layer.w_uv)}
        assert len(places) == 1 + copies
        assert layer.state_dict() == {}  # they are the model's, whose checkpoint has them


def test_nothing_carries_a_gradient() -> None:
    problem = random_mla_problem(0, AttentionConfig(**SMALL, dtype="float32"), requests=MIXED)
    group = MLAAttentionGroup(select(problem.step.config, device="cpu", backend="TORCH_MLA"), workspace_tokens=20)
    step, metadata = problem.step, group.build(common_of(problem))
    assert step.kv_cache is not None
    given = [tensor.clone().requires_grad_() for tensor in (problem.query, step.key, step.value)]
    with torch.enable_grad():
        output = layer_of(group, problem)(*given, step.kv_cache.clone(), metadata)
    assert not output.requires_grad
    assert relative_error(output, problem.reference()[0]).norm < 1e-5


def test_prefill_alone() -> None:
    """A machine that only prefills: no backend reads the cache, yet it is written, and single tokens are prefills."""
    config = AttentionConfig(**SMALL, block_size=64, kv_cache_dtype="fp8_e4m3")
    problem = random_mla_problem(3, config, requests=[(1, 70), (1, 1), (20, 31), (6, 6)])
    ran = run(problem, common_of(problem), phases=("prefill",), workspace_tokens=16)
    assert ran.group.kernel_block_size == 64
    assert ran.group.reorder_batch_threshold is None
    assert same_bits(ran.kv_cache, problem.step.written_cache())
    bound = error_bound(config, ran.group.selection.plans)
    assert relative_error(ran.output[: ran.tokens], problem.reference(0)[0]).row <= bound.row


@pytest.mark.parametrize(("phases", "missing"), [(("decode",), "prefill"), (("prefill",), None)])
def test_a_phase_that_was_not_loaded(phases: Any, missing: str | None) -> None:
    problem = random_mla_problem(0, AttentionConfig(**SMALL), requests=[(1, 4), (8, 8)])
    group = MLAAttentionGroup(select(problem.step.config, device="cpu", backend="TORCH_MLA"), phases=phases)
    if missing is None:
        assert [part.phase for part in group.build(common_of(problem)).parts] == ["prefill"]
        return
    with pytest.raises(BatchError, match=rf"requests in {missing}, but this group was made for decode only"):
        group.build(common_of(problem))
    assert group.workspace.numel() == 0  # decode decompresses nothing


@pytest.mark.parametrize("name", ["kv_c_normed", "k_pe"])
def test_one_of_the_latents_may_have_padding(name: str) -> None:
    problem = random_mla_problem(0, AttentionConfig(**SMALL), requests=[(1, 4), (8, 8)])
    step, group = problem.step, MLAAttentionGroup(select(problem.step.config, device="cpu", backend="TORCH_MLA"))
    assert step.kv_cache is not None
    assert step.key is not None
    assert step.value is not None
    given = {"kv_c_normed": step.key, "k_pe": step.value, "kv_cache": step.kv_cache.clone()}
    given[name] = padded(given[name])
    layer_of(group, problem)(problem.query, **given, attn_metadata=group.build(common_of(step)))
    assert same_bits(given["kv_cache"], step.written_cache())


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("query", lambda t: t[..., :-1], r"query of shape \(9, 4, 23\): accepted is \(at least 9 tokens, 4, 24\)"),
        ("query", lambda t: t[:8], r"query of shape \(8, 4, 24\)"),
        ("query", lambda t: t.double(), r"query is torch.float64: accepted is torch.bfloat16"),
        ("kv_c_normed", lambda t: t[:, 1:], r"kv_c_normed of shape \(9, 31\): accepted is \(at least 9 tokens, 32\)"),
        ("kv_c_normed", lambda t: None, r"kv_c_normed is None: accepted is \(at least 9 tokens, 32\)"),
        ("k_pe", lambda t: t[:5], r"k_pe of shape \(5, 8\)"),
        ("k_pe", lambda t: t.half(), r"k_pe is torch.float16"),
        ("kv_cache", lambda t: None, r"kv_cache is None"),
        ("kv_cache", lambda t: t.float(), r"kv_cache is torch.float32"),
        ("kv_cache", lambda t: t.view(-1, 8, 40), r"kv_cache of shape \(\d+, 8, 40\)"),
        ("output", lambda t: t[..., :8], r"output of shape \(9, 4, 8\): accepted is \(at least 9 tokens, 4, 24\)"),
        ("output", lambda t: t.float(), r"output is torch.float32: accepted is torch.bfloat16"),
        (
            "topk_indices",
            lambda t: torch.zeros(9, 4, dtype=torch.int32),
            r"topk_indices given, but sparse_top_k = None",
        ),
        ("output_lse", lambda t: t[:, :2], r"output_lse of shape \(9, 2\): accepted is \(at least 9 tokens, 4\)"),
        ("output_lse", lambda t: t.double(), r"output_lse is torch.float64"),
        ("attn_metadata", lambda t: None, r"layer 'attention.\d+': no attn_metadata was given"),
    ],
)
def test_bad_arguments_are_named(name: str, change: Callable[[Any], Any], says: str) -> None:
    problem = random_mla_problem(0, AttentionConfig(**SMALL), requests=[(1, 4), (8, 8)])
    step, group = problem.step, MLAAttentionGroup(select(problem.step.config, device="cpu", backend="TORCH_MLA"))
    assert step.kv_cache is not None
    given = {
        "query": problem.query,
        "kv_c_normed": step.key,
        "k_pe": step.value,
        "kv_cache": step.kv_cache.clone(),
        "attn_metadata": group.build(common_of(step)),
        "output": torch.empty(9, 4, 24, dtype=torch.bfloat16),
        "topk_indices": None,
        "output_lse": torch.empty(9, 4),
    }
    layer, before = layer_of(group, problem), given["kv_cache"].clone()
    with pytest.raises((BatchError, ConfigError), match=says):
        layer(**{**given, name: change(given[name])})
    assert same_bits(given["kv_cache"], before)


def test_a_weight_of_the_wrong_shape() -> None:
    group = MLAAttentionGroup(select(AttentionConfig(**SMALL), device="cpu", backend="TORCH_MLA"))
    with pytest.raises(ConfigError, match=r"kv_b_proj of shape \(32, 160\): accepted is \(160, 32\)"):
        MLAAttention(group, torch.zeros(32, 160))


@pytest.mark.parametrize(("phase", "path"), [("prefill", "forward_mha"), ("decode", "forward_mqa")])
def test_an_impl_without_the_path_of_a_phase(phase: Phase, path: str) -> None:
    group = MLAAttentionGroup(select(AttentionConfig(**SMALL), device="cpu", backend="TORCH_MLA"), phases=[phase])

    class Pathless(MLAAttentionImpl):
        pass

    group.backends[0].backend = type("Backend", (AttentionBackend,), {"impl_cls": Pathless})
    with pytest.raises(PluginError, match=f"Pathless has no {path}, but its backend's spec serves {phase}"):
        MLAAttention(group, torch.zeros(160, 32))


class SparseMetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Hands the batch on."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CommonAttentionMetadata:
        return common_attn_metadata


class SparseImpl(MLAAttentionImpl):
    """Sparse attention by the oracle, in the cache's own blocks; remembers the calls."""

    calls: list[tuple[int, tuple[int, ...]]]

    def forward_mqa(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: CommonAttentionMetadata,
        output: Tensor,
        output_lse: Tensor | None = None,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        self.calls.append((attn_metadata.num_reqs, tuple(kv_cache.shape)))
        context, tokens = self.context, attn_metadata.num_actual_tokens
        assert topk_indices is not None
        assert context.kv_layout is not None
        result, lse = sparse_mla_reference(
            query[:tokens],
            kv_cache,
            context.kv_layout,
            topk_indices[:tokens],
            context.config,
            self.scale,
            sinks=self.sinks,
            k_scale=layer.scales.k if context.config.cache_dtype.startswith("fp8_e") else None,
        )
        output[:tokens] = result
        if output_lse is not None:
            output_lse[:tokens] = lse
        return output


def sparse_spec(name: str, layout: str, block_size: int, calls: list[tuple[int, tuple[int, ...]]]) -> BackendSpec:
    """Return a backend for sparse layers in both phases."""

    class Impl(SparseImpl):
        pass

    class Backend(AttentionBackend):
        impl_cls = Impl
        builder_cls = SparseMetadataBuilder

    Impl.calls = calls
    facts = TORCH_MLA.capabilities["decode"]
    dtypes = dataclasses.replace(facts.kv_cache_dtypes, value=(*facts.kv_cache_dtypes.value, "fp8_ds_mla"))
    served = dataclasses.replace(facts, sparse=True, kv_cache_dtypes=dtypes)
    plan = BackendPlan(
        path="toy",
        because="the only one",
        query_dtype="bfloat16",
        returns_lse=True,
        kv_layouts=(layout,),
        kernel_block_sizes=(block_size,),
        cuda_graph="ALWAYS",
    )
    return dataclasses.replace(
        TORCH_MLA,
        name=name,
        capabilities={"prefill": served, "decode": served},
        plan=lambda *_: plan,
        load=lambda: Backend,
        libraries=(),
    )


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (MLA, {**SMALL, "sparse_top_k": 12}),
        (MLA, {**SMALL, "sparse_top_k": 12, "kv_cache_dtype": "fp8_e4m3", "sinks": True}),
        (FP8_DS_MLA, {**DEEPSEEK, "sparse_top_k": 16, "kv_cache_dtype": "fp8_ds_mla"}),
    ],
)
@pytest.mark.parametrize("backends", [1, 2])
def test_sparse_layers(layout: str, fields: dict[str, Any], backends: int, choose: Choose) -> None:
    """Everything goes the latent way: one backend gets the whole batch, two get their phase in their own blocks."""
    config = AttentionConfig(**fields, block_size=64, dtype="bfloat16")
    problem = random_mla_problem(0, config, layout, requests=MIXED)
    calls: list[tuple[int, tuple[int, ...]]] = []
    large, small = (sparse_spec(name, layout, size, calls) for name, size in (("LARGE", 64), ("SMALL", 32)))
    capabilities = small.capabilities["decode"]
    toys = [SimpleNamespace(spec=large)]
    if backends == 2:
        toys.insert(0, SimpleNamespace(spec=dataclasses.replace(small, capabilities={"decode": capabilities})))
    ran = run(problem, common_of(problem), selection=choose(config, *toys))
    ran.check()
    blocks, width = len(ran.kv_cache), ran.kv_cache.shape[2]
    if backends == 1:
        assert calls == [(8, (blocks, 64, width))]
        assert ran.metadata.num_decode_tokens == ran.tokens
    else:
        assert calls == [(3, (2 * blocks, 32, width)), (5, (blocks, 64, width))]
        assert ran.metadata.num_decode_tokens == 3


@pytest.mark.parametrize("missing", ["missing", "int64", "width"])
def test_sparse_layers_need_their_indices(missing: str, choose: Choose) -> None:
    config = AttentionConfig(**SMALL, sparse_top_k=12, block_size=64)
    problem = random_mla_problem(0, config, requests=MIXED)
    group = MLAAttentionGroup(choose(config, SimpleNamespace(spec=sparse_spec("TOY", MLA, 64, []))))
    step, indices = problem.step, problem.step.topk_indices
    assert indices is not None
    given = {"missing": None, "int64": indices.long(), "width": indices[:, :5]}[missing]
    says = {"missing": "topk_indices missing, but sparse_top_k = 12", "int64": "is torch.int64", "width": r"\(76, 5\)"}
    layer, metadata = layer_of(group, problem), group.build(common_of(step))
    with pytest.raises(BatchError, match=says[missing]):
        layer(problem.query, step.key, step.value, step.kv_cache, metadata, topk_indices=given)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (MLA, {**SMALL}),
        (MLA, {**SMALL, "kv_cache_dtype": "fp8_e4m3"}),
        (MLA, {**SMALL, "kv_cache_dtype": "fp8_e5m2", "per_head_quant_scales": True}),
        (MLA, {**SMALL, "dtype": "float32", "kv_cache_dtype": "float16"}),
        (FP8_DS_MLA, {**DEEPSEEK, "sparse_top_k": 8, "kv_cache_dtype": "fp8_ds_mla"}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_written_as_the_oracle_writes(layout: str, fields: dict[str, Any], seed: int) -> None:
    """Bit for bit, untouched slots included; saturated numbers and a token without a slot are among them."""
    config = AttentionConfig(**fields)
    problem = random_problem(seed, config, layout)
    assert problem.kv_cache is not None
    assert problem.slot_mapping is not None
    problem.slot_mapping[2] = -1
    problem.key[:2] *= 1e4
    scales = Scales.make("cpu", num_kv_heads=1 if config.per_head_quant_scales else 0)
    if problem.k_scale is not None:
        scales = dataclasses.replace(scales, k=problem.k_scale)
    cache = problem.kv_cache.clone()
    ops.concat_and_cache_mla(problem.key, problem.value, cache, problem.slot_mapping, layout, config, scales)
    assert same_bits(cache, problem.written_cache())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph(backend: str) -> None:
    """The graph holds the layer as one operator, and takes the next step's metadata without being made anew."""
    from torch._dynamo.testing import CompileCounterWithBackend

    config = AttentionConfig(**SMALL, dtype="float32")
    first = random_mla_problem(0, config, requests=MIXED)
    group = MLAAttentionGroup(select(config, device="cpu", backend="TORCH_MLA"), workspace_tokens=30)
    layer = layer_of(group, first)

    def model(query: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor) -> Tensor:
        output: Tensor = layer(2 * query, kv_c, k_pe, kv_cache)
        return output + 1

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed in range(2):
        problem = random_mla_problem(seed, config, requests=MIXED)
        step = problem.step
        assert step.kv_cache is not None
        common = common_of(step)
        given = (problem.query / 2, step.key, step.value)
        with forward_context({group: group.build(common)}), torch.no_grad():
            caches = step.kv_cache.clone(), step.kv_cache.clone()
            outputs = compiled(*given, caches[0]), model(*given, caches[1])
        assert same_bits(*outputs)
        assert same_bits(*caches)
        if seed == 0:  # the weight is this problem's
            assert relative_error(outputs[0] - 1, first.reference()[0]).norm < 1e-5
    torch._dynamo.reset()
    assert counter.frame_count == 1


def test_a_compiled_layer_takes_no_metadata() -> None:
    config = AttentionConfig(**SMALL, dtype="float32")
    problem = random_mla_problem(0, config, requests=[(1, 5)])
    group = MLAAttentionGroup(select(config, device="cpu", backend="TORCH_MLA"))
    layer, step = layer_of(group, problem), problem.step

    def model(query: Tensor) -> Tensor:
        output: Tensor = layer(query, step.key, step.value, step.kv_cache, output_lse=torch.empty(1, 4))
        return output

    with pytest.raises(Exception, match="attn_metadata and output_lse must be None"):
        torch.compile(model, backend="eager")(problem.query)
    torch._dynamo.reset()


def test_a_copied_layer_runs_its_own_weights() -> None:
    """A compiled graph finds its layer by name: the copy's name must not lead to the original."""
    problem = random_mla_problem(3, AttentionConfig(**SMALL, dtype="float32"), MLA)
    ran = run(problem, common_of(problem))
    twin = copy.deepcopy(ran.layer)
    assert twin.layer_name != ran.layer.layer_name
    assert twin.group is ran.group
    twin.kv_b_proj.mul_(2.0)
    given = (problem.query, problem.step.key, problem.step.value, ran.kv_cache)
    outputs = []
    for layer in (ran.layer, twin):
        compiled, eager = torch.zeros(2, *ran.output[: ran.tokens].shape)
        with forward_context({ran.group: ran.metadata}):
            torch.ops.attn_select.mla_attention(*given[:3], None, given[3], compiled, layer.layer_name)
        layer(*given, ran.metadata, eager)
        assert same_bits(compiled, eager)
        outputs.append(compiled)
    assert not torch.equal(*outputs)


def test_metadata_of_another_group_is_refused() -> None:
    problem = random_mla_problem(3, AttentionConfig(**SMALL, dtype="float32"), MLA)
    ran = run(problem, common_of(problem))
    foreign = MLAAttentionGroup(ran.group.selection).build(common_of(problem))
    given = (problem.query, problem.step.key, problem.step.value, ran.kv_cache)
    with pytest.raises(BatchError, match="attn_metadata was built by another group than the layer's"):
        ran.layer(*given, foreign)


def test_layers_of_another_kind_are_refused() -> None:
    group = attention_group(select(AttentionConfig(num_heads=4, head_size=16), device="cpu"))
    with pytest.raises(ConfigError, match="the group's layers are not MLA: make them with Attention"):
        MLAAttention(group, torch.zeros(160, 32))  # type: ignore[arg-type]


def test_names_of_living_layers_are_unique() -> None:
    problem = random_mla_problem(3, AttentionConfig(**SMALL, dtype="float32"), MLA)
    layer = run(problem, common_of(problem)).layer
    with pytest.raises(ConfigError, match=f"layer_name = '{layer.layer_name}': a layer of that name exists"):
        MLAAttention(layer.group, problem.kv_b_proj, layer_name=layer.layer_name)


@pytest.mark.parametrize("silent", ["prefill", "decode"])
def test_a_phase_without_lse(silent: Phase) -> None:
    problem = random_mla_problem(3, AttentionConfig(**SMALL, dtype="float32"), MLA)
    ran = run(problem, common_of(problem))
    context = ran.group.backends[0].context
    context.plans = {**context.plans, silent: dataclasses.replace(context.plans[silent], returns_lse=False)}
    layer = layer_of(ran.group, problem)
    given = (problem.query, problem.step.key, problem.step.value, ran.kv_cache, ran.metadata)
    layer(*given)
    with pytest.raises(BatchError, match="output_lse given, but TORCH_MLA returns no LSE"):
        layer(*given, output_lse=torch.zeros(len(problem.query), 4))
