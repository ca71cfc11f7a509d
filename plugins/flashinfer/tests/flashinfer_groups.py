"""What the tests of FLASHINFER's runtime share: groups and layers of one path, and batches on small caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attn_select.backends.spec import BackendPlan
from attn_select.decide.selector import environment_for
from attn_select.machine.detection import detect_device
from attn_select.machine.device import lookup
from attn_select.reference.oracle_paged import paged_reference
from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, AttentionGroup, Capacity, attention_group
from attn_select.testing import gqa_layer, selection_of
from attn_select_flashinfer.facts.mha import FLASHINFER

RELEASE: Mapping[str, Any] = {"pins": {"flashinfer-python": "0.6.14"}}
"""The release that the facts were read in and run with."""


def with_plans(selection: Any, change: Callable[[BackendPlan], BackendPlan] | None) -> Any:
    """Return the selection with each plan replaced by what ``change`` makes of it."""
    if change is not None:
        phases = selection.candidates[0].phases
        for phase, verdict in phases.items():
            assert verdict.plan is not None
            phases[phase] = replace(verdict, plan=change(verdict.plan))
    return selection


def selected(
    fields: dict[str, Any],
    gpu: str | None = "h100",
    layout: str | None = None,
    change: Any = None,
    release: str | None = None,
    **options: Any,
) -> Any:
    """Return the selection of FLASHINFER alone, for a GPU by name or (None) the one that is there.

    Args:
        change: makes another plan of each.
        release: of FlashInfer, where a GPU is named; None: the one that the facts are for.
    """
    config = gqa_layer(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 64, **fields})
    device = lookup(gpu) if gpu else detect_device().device
    stated = RELEASE if gpu else {"environment": environment_for(device)}
    if release is not None:
        stated = {"pins": {"flashinfer-python": release}}
    return with_plans(selection_of(FLASHINFER, config, device, layout=layout, options=options, **stated), change)


def made(gpu: str = "h100", layout: str | None = None, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return a group on the CPU, of emulated kernels; ``group_*`` fields go to the group."""
    return _group(fields, gpu, layout, options or {}, "cpu")


def on_gpu(layout: str | None = None, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return a group of the real kernels."""
    return _group(fields, None, layout, options or {}, "cuda")


def _group(fields: dict[str, Any], gpu: str | None, layout: Any, options: dict[str, Any], device: str) -> Any:
    given = {name.removeprefix("group_"): fields.pop(name) for name in list(fields) if name.startswith("group_")}
    given.setdefault("capacity", Capacity(16, 1024, 1024))
    change, release = fields.pop("change", None), fields.pop("release", None)
    return attention_group(selected(fields, gpu, layout, change, release, **options), device, **given)


def builder_of(group: AttentionGroup) -> Any:
    return group.distinct[0].builder


def drawn_query(group: AttentionGroup, tokens: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    config = group.config
    query = torch.randn(tokens, config.num_heads, config.head_size, generator=draw)
    return query.to(getattr(torch, config.dtype)).to(group.device)


def run(
    group: Any, common: Any, cache: Any, layer: Any = None, *, padding: int = 0, lse: bool = True, **build: Any
) -> tuple[Any, Any]:
    """Return output and LSE of random queries; ``padding`` rows behind the batch's are poisoned."""
    tokens = common.num_actual_tokens + padding
    query = drawn_query(group, tokens)
    output = torch.full_like(query, torch.nan)
    wanted = torch.full(query.shape[:2], torch.nan, device=group.device) if lse else None
    layer = layer or Attention(group, caller_writes=True)
    layer.forward(query, None, None, cache, group.build(common, **build), output, wanted)
    return output, wanted


def reference(group: Any, common: Any, cache: Any, layer: Any, sinks: Any = None) -> tuple[Any, Any]:
    """Return output and LSE of the queries that ``run`` draws, in float64."""
    config = group.config.model_copy(update={"non_causal": group.config.non_causal or not common.causal})
    scales = {"k_scale": layer.terms.scales.k, "v_scale": layer.terms.scales.v} if cache.element_size() == 1 else {}
    return paged_reference(
        drawn_query(group, common.num_actual_tokens), cache, group.kv_layout, common.block_table_tensor,
        common.query_start_loc, common.seq_lens, config, layer.terms.scale, sinks=sinks, **scales,
    )  # fmt: skip


def check_in_any_order(group: Any, layer: Any, batches: Sequence[tuple[list[int], list[int]]], **more: Any) -> None:
    """Build all steps, whose lengths the caller changes then, run them in this order and the other one, and compare."""
    steps = []
    for query_lens, seq_lens in batches:
        common, cache = random_batch(group, query_lens, seq_lens)
        expected, _ = reference(group, common, cache, layer, **more)
        common = dataclasses.replace(common, seq_lens_cpu=common.seq_lens_cpu.clone())
        steps.append((common, cache, group.build(common), expected))
        common.seq_lens_cpu.zero_()
    for common, cache, metadata, expected in (*steps, *reversed(steps)):
        query = drawn_query(group, common.num_actual_tokens)
        output = layer.forward(query, None, None, cache, metadata, torch.empty_like(query))
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
