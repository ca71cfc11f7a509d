"""Sparse layers of ``MLAAttention`` on backends made for these tests: the batches and indices that they are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from mla_steps import DEEPSEEK, MIXED, SMALL, layer_of, run
from torch import Tensor

from attn_select import AttentionConfig
from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.selection import Selection
from attn_select.layer.layouts import FP8_DS_MLA, MLA
from attn_select.reference.running import common_of
from attn_select.runtime import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BatchError,
    CommonAttentionMetadata,
    MLAAttentionGroup,
    MLAAttentionImpl,
    Outputs,
)
from attn_select.testing import (
    load_path_of,
    random_mla_problem,
    sparse_mla_reference,
)
from attn_select_torch.facts.torch_mla import TORCH_MLA

Choose = Callable[..., Selection]


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
        query: Tensor,
        kv_cache: Tensor,
        attn_metadata: CommonAttentionMetadata,
        outputs: Outputs,
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
            self.terms.scale,
            sinks=self.terms.sinks,
            k_scale=self.terms.scales.k if context.config.cache_dtype.startswith("fp8_e") else None,
        )
        outputs.output[:tokens] = result
        if outputs.lse is not None:
            outputs.lse[:tokens] = lse
        return outputs.output


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
        load=load_path_of(Backend),
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
