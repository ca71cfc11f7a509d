"""A backend made for tests, every property of which can be set, and ways to bring batches before it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from decider import Decider
from torch import Tensor

from attn_select.backends.registry import Registry
from attn_select.backends.spec import (
    BackendOptions,
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
)
from attn_select.decide.explicit import parse_choice
from attn_select.decide.selection import Selection
from attn_select.layer.config import PHASES, AttentionConfig, CudaGraphLevel, Phase
from attn_select.layer.layouts import FLASH_ATTN_NHD, PAGED_ATTENTION
from attn_select.machine.device import CPU
from attn_select.machine.environment import Environment
from attn_select.rules.layers import RuleSet
from attn_select.runtime import (
    AttentionBackend,
    AttentionGroup,
    AttentionImpl,
    AttentionMetadataBuilder,
    BlockTable,
    CommonAttentionMetadata,
    Outputs,
    Terms,
    key_value_views,
    ops,
    prepare_batch,
)
from attn_select.runtime.cascade import CascadeSplit, split_for_cascade
from attn_select.runtime.kv_cache import paged_attention_views
from attn_select.testing import load_path_of

EVERY_TYPE = ("decoder", "encoder", "encoder_only", "encoder_decoder")


@dataclass(frozen=True)
class ToyKernel:
    """What a toy's plan runs."""

    name: str


@dataclass
class ToyMetadata:
    """What the toy's builder builds; tests look at it."""

    common: CommonAttentionMetadata
    prefix_len: int
    fast_build: bool
    cascade: CascadeSplit | None


@dataclass
class Toy:
    """One backend made for tests.

    Attributes:
        spec: to be put in a registry.
        builds: what its builders built, in order.
        calls: ``update`` and ``forward`` in the order in which layers called them.
        caches: the shape of the cache at each of these calls; None without.
    """

    spec: BackendSpec
    builds: list[ToyMetadata] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    caches: list[tuple[int, ...] | None] = field(default_factory=list)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    terms: Terms,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend in float32 from the last rows of one request; return output ``(T, H, Dv)`` and LSE ``(T, H)``."""
    heads, size = query.shape[1], len(keys)
    keys, values = (t.float().repeat_interleave(heads // t.shape[1], dim=1) for t in (keys, values))
    scores = terms.scale * torch.einsum("thd,shd->hts", query.float(), keys)
    if terms.logits_soft_cap is not None:
        scores = terms.logits_soft_cap * torch.tanh(scores / terms.logits_soft_cap)
    distance = torch.arange(size - len(query), size)[:, None] - torch.arange(size)
    if terms.alibi_slopes is not None:
        scores = scores - terms.alibi_slopes[:, None, None] * distance.abs()
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if terms.sliding_window is not None:
        hidden = hidden | (distance.abs() >= terms.sliding_window)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if terms.sinks is not None:
        lse = torch.logaddexp(lse, terms.sinks.float()[:, None])
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
    return torch.einsum("hts,shd->thd", weights, values), lse.T


class ToyImpl(AttentionImpl[ToyMetadata]):
    """Request by request, through strided views of the cache."""

    toy: Toy

    def do_kv_cache_update(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        self.toy.calls.append("update")
        self.toy.caches.append(tuple(kv_cache.shape))
        super().do_kv_cache_update(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        attn_metadata: ToyMetadata,
        outputs: Outputs,
    ) -> Tensor:
        self.toy.calls.append("forward")
        self.toy.caches.append(None if kv_cache is None else tuple(kv_cache.shape))
        output, terms = outputs.output, self.terms
        if outputs.block_scale is not None:  # tests of FP4 ask which call arrives, not what it computes
            return output
        common = attn_metadata.common
        tokens = int(common.query_start_loc_cpu[-1])
        if kv_cache is None:
            assert key is not None
            assert value is not None
        if attn_metadata.cascade is None:
            result, lse = self._batch(query, key, value, kv_cache, common, terms)
        else:
            assert kv_cache is not None
            split = attn_metadata.cascade
            prefix, prefix_lse = self._batch(query, key, value, kv_cache, split.prefix, terms.without_sinks())
            result, lse = self._batch(query, key, value, kv_cache, split.suffix, terms)
            ops.merge_attn_states(result, prefix, prefix_lse, result, lse, lse)
        output[:tokens] = result if outputs.scale is None else (result / outputs.scale)
        if outputs.lse is not None:
            outputs.lse[:tokens] = lse
        return output

    def _batch(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        common: CommonAttentionMetadata,
        terms: Terms,
    ) -> tuple[Tensor, Tensor]:
        config = self.context.config
        causal = common.causal and config.attn_type == "decoder" and not config.non_causal
        bounds = common.query_start_loc_cpu.tolist()
        output = torch.zeros(bounds[-1], config.num_heads, config.value_head_size)
        lse = torch.full((bounds[-1], config.num_heads), -torch.inf)
        for request, seq_len in enumerate(common.seq_lens.tolist()):  # as on a device, where replays change them
            rows = slice(bounds[request], bounds[request + 1])
            if kv_cache is None:
                assert key is not None
                assert value is not None
                keys, values = key[rows], value[rows]
            else:
                assert common.block_table_tensor is not None
                keys, values = self._cached(kv_cache, common.block_table_tensor[request], seq_len)
            output[rows], lse[rows] = attend(query[rows], keys, values, terms, causal)
            if kv_cache is not None and not all(plan.nan_tail_safe for plan in self.context.plans.values()):
                assert common.block_table_tensor is not None
                size = cast(int, self.context.block_size)
                whole = self._cached(kv_cache, common.block_table_tensor[request], -(-seq_len // size) * size)
                output[rows] += 0 * whole[1].sum()  # what lies behind the last key has weight 0
        return output, lse

    def _cached(self, cache: Tensor, row: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        config, size, layout = self.context.config, self.context.block_size, self.context.kv_layout
        assert size is not None
        assert layout is not None
        if layout == PAGED_ATTENTION:
            k, v = paged_attention_views(cache, config)
            views = (k.permute(0, 3, 1, 2, 4).flatten(3), v.permute(0, 3, 1, 2))
        else:
            views = key_value_views(cache, layout, config)
        assert views[0].shape[1] == size
        positions = torch.arange(seq_len)
        blocks = row[positions // size].long()
        found = []
        for view, scale in zip(views, (self.terms.scales.k, self.terms.scales.v), strict=True):
            numbers = view[blocks, positions % size].float()
            found.append(numbers * scale.reshape(-1, 1) if config.cache_dtype.startswith("fp8") else numbers)
        return found[0], found[1]


MakeToy = Callable[..., Toy]


@pytest.fixture(scope="session")
def make_toy() -> MakeToy:
    """Return a factory of backends; see ``make``'s arguments."""

    def make(
        name: str = "TOY",
        *,
        layouts: Sequence[str] = (FLASH_ATTN_NHD,),
        kernel_block_sizes: Sequence[int] = (16,),
        width_multiple: int = 1,
        phases: Sequence[Phase] = PHASES,
        reorder: int | None = None,
        cascade: bool = True,
        returns_lse: Collection[Phase] = PHASES,
        level: CudaGraphLevel = "ALWAYS",
        includes_update: bool = False,
        nan_tail_safe: bool = True,
        options: type[BackendOptions] = BackendOptions,
        workspace_bytes: int = 0,
    ) -> Toy:
        class Builder(AttentionMetadataBuilder[ToyMetadata]):
            reorder_batch_threshold = reorder

            def build(
                self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
            ) -> ToyMetadata:
                split = None
                if common_prefix_len:
                    assert self.context.block_size is not None
                    split = split_for_cascade(common_attn_metadata, common_prefix_len, self.context.block_size)
                toy.builds.append(ToyMetadata(common_attn_metadata, common_prefix_len, fast_build, split))
                return toy.builds[-1]

            def use_cascade_attention(
                self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata
            ) -> bool:
                return cascade and super().use_cascade_attention(common_prefix_len, common_attn_metadata)

        class Impl(ToyImpl):
            pass

        class Backend(AttentionBackend):
            forward_includes_kv_cache_update = includes_update

            impl_cls = Impl
            builder_cls = Builder

        def plan(config: AttentionConfig, _device: Any, _environment: Any, _options: Any, phase: Phase) -> BackendPlan:
            cached = (tuple(layouts), tuple(kernel_block_sizes)) if config.has_cache else ((), ())
            return BackendPlan(
                kernel=ToyKernel(f"{name.lower()}-{phase}"),
                path="toy",
                because="the only one",
                query_dtype=config.dtype,
                returns_lse=phase in returns_lse,
                kv_layouts=cached[0],
                kernel_block_sizes=cached[1],
                cuda_graph=level,
                block_table_width_multiple=width_multiple,
                nan_tail_safe=nan_tail_safe,
                workspace_bytes=workspace_bytes,
            )

        yes, no_limit = Fact(True, "toy"), HeadSizes()
        served = Capabilities(
            compute_capabilities=Fact(ComputeCapabilities((((5, 0), (12, 9)),), cpu=True), "toy"),
            dtypes=Fact(("bfloat16", "float16", "float32"), "toy"),
            kv_cache_dtypes=Fact(("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"), "toy"),
            head_sizes=Fact(no_limit, "toy"),
            block_sizes=Fact(tuple(kernel_block_sizes), "toy"),
            attn_types=Fact(EVERY_TYPE, "toy"),
            mixed_kv_cache_dtype=yes,
            v_head_size_differs=yes,
            sliding_window=yes,
            logits_soft_cap=yes,
            alibi=yes,
            sinks=yes,
            mm_prefix=yes,
            non_causal=yes,
            batch_invariant=yes,
            draft_tree=yes,
            per_head_quant_scales=yes,
            output_quantizations=Fact(("fp8", "fp4"), "toy"),
            nan_tail_safe=Fact(nan_tail_safe, "toy"),
        )
        spec = BackendSpec(
            name=name,
            summary="made for tests",
            capabilities=dict.fromkeys(phases, served),
            plan=plan,
            load=load_path_of(Backend),
            options=options,
        )
        toy = Toy(spec)
        Impl.toy = toy
        return toy

    return make


Choose = Callable[..., Selection]
MakeGroup = Callable[..., AttentionGroup]


@pytest.fixture(scope="session")
def choose() -> Choose:
    """Return ``choose(config, *toys, tables={})``: the selection among these toys alone.

    The first toy that serves a phase is chosen for it. ``tables`` are ``[backends.NAME]`` tables.
    """

    def make(config: AttentionConfig, *toys: Toy) -> Selection:
        registry = Registry(
            specs={toy.spec.name: toy.spec for toy in toys}, owners={toy.spec.name: "test" for toy in toys}
        )
        decider = Decider(registry, RuleSet(), CPU, Environment(assume_installed=True))
        served = {phase: toy.spec.name for toy in reversed(toys) for phase in toy.spec.capabilities}
        chosen = [f"{phase}={name}" for phase, name in served.items() if phase in config.phases]
        return decider.decide(config, parse_choice(chosen, decider.names))

    return make


@pytest.fixture(scope="session")
def make_group(make_toy: MakeToy, choose: Choose) -> MakeGroup:
    """Return ``make_group(config, *toys, **options)``: a group on the CPU; without toys, of one that takes it all."""

    def make(config: AttentionConfig, *toys: Toy, **options: Any) -> AttentionGroup:
        return AttentionGroup(choose(config, *(toys or (make_toy(),))), **options)

    return make


MakeBatch = Callable[..., CommonAttentionMetadata]


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Return ``make_batch(requests, block_size=16, **options)``: each ``(query_len, seq_len)``, on blocks in a row."""

    def make(requests: Sequence[tuple[int, int]], block_size: int = 16, **options: Any) -> CommonAttentionMetadata:
        query_lens, seq_lens = zip(*requests, strict=True)
        needed = [-(-seq_len // block_size) for seq_len in seq_lens]
        table = BlockTable(len(requests), max(*needed, 1), block_size, "cpu")
        first = 0
        for row, count in enumerate(needed):
            table.append_row(row, range(first, first + count))
            first += count
        return prepare_batch(query_lens, seq_lens, table, **options)

    return make
