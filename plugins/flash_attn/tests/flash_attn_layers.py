"""What the tests share: stated environments, small groups of one provider, and batches on small caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_select.decide.selection import Selection
from attn_select.layer.config import AttentionConfig
from attn_select.machine.environment import Environment
from attn_select.reference.oracle_paged import paged_reference
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    Capacity,
    attention_group,
)
from attn_select.testing import environment_of, gqa_layer, selection_of
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN

BF16 = torch.bfloat16


def installed(**versions: str) -> Environment:
    """Return an environment in which torch and only these distributions (``flash_attn_3="3.0"``) are installed."""
    there = {name.replace("_", "-"): version for name, version in versions.items()}
    return environment_of(installed={"torch": "2.11.0", **there})


def small_layer(**fields: Any) -> AttentionConfig:
    return gqa_layer(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 64, **fields})


def group_of(selection: Selection, device: str = "cpu", **options: Any) -> AttentionGroup:
    options.setdefault("capacity", Capacity(16, 512, 512))
    return attention_group(selection, device, **options)


def made(provider: str, gpu: str = "h100", layout: str | None = None, **fields: Any) -> Any:
    """Return a group on the CPU of one provider's emulated kernels; ``group_*`` fields go to the group."""
    options = {name.removeprefix("group_"): fields.pop(name) for name in list(fields) if name.startswith("group_")}
    selection = selection_of(FLASH_ATTN, small_layer(**fields), gpu, layout=layout, options={"provider": provider})
    return group_of(selection, **options)


def run(group: Any, common: Any, cache: Any, layer: Any = None, padding: int = 0, **build: Any) -> tuple[Any, Any]:
    """Return output and LSE of random queries; ``padding`` rows behind the batch's are poisoned."""
    config = group.config
    torch.manual_seed(1)
    tokens = common.num_actual_tokens + padding
    query = torch.randn(tokens, config.num_heads, config.head_size).to(getattr(torch, config.dtype))
    output = torch.full((tokens, config.num_heads, config.value_head_size), torch.nan, dtype=query.dtype)
    lse = torch.full((tokens, config.num_heads), torch.nan)
    layer = layer or Attention(group, caller_writes=True)
    layer.forward(query, None, None, cache, group.build(common, **build), output, lse)
    return output, lse


def calls_of(calls: list[dict[str, Any]], scheduling: bool = False) -> list[dict[str, Any]]:
    return [call for call in calls if (call["function"] == "get_scheduler_metadata") == scheduling]


def reference(group: Any, common: Any, cache: Any, layer: Any, **options: Any) -> tuple[Any, Any]:
    """Return output and LSE of the queries that ``run`` draws, in float64."""
    torch.manual_seed(1)
    config = group.config
    query = torch.randn(common.num_actual_tokens, config.num_heads, config.head_size).bfloat16()
    table, bounds = common.block_table_tensor, common.query_start_loc
    given = (query, cache, group.kv_layout, table, bounds, common.seq_lens, config, layer.terms.scale)
    return paged_reference(*given, **options)


def always_cascade(group: Any) -> None:
    group.distinct[0].builder.least_cascade_bytes = 0


def on_gpu(**fields: Any) -> Any:
    """Return a group of the real kernels, or skip."""
    from attn_select import Environment, select
    from attn_select.machine.environment import installed_version

    options = {name.removeprefix("group_"): fields.pop(name) for name in list(fields) if name.startswith("group_")}
    bare = installed_version("vllm") is None
    environment = Environment(pins={"vllm": "0.26.0"}) if bare else None
    selection = select(small_layer(**fields), backend="FLASH_ATTN", environment=environment)
    try:
        return group_of(selection, "cuda", **options)
    except ImportError as error:
        pytest.skip(str(error))
