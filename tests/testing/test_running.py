"""A batch of the oracle as a backend runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_select.layer.config import AttentionConfig
from attn_select.layer.layouts import FP8_DS_MLA, LAYOUTS, MLA, cache_shape
from attn_select.reference.running import reblocked
from attn_select.testing import gather_reference, random_problem, same_bits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_caches_in_other_blocks_hold_the_same_tokens(layout: str) -> None:
    sizes: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2, "head_size": 32, "v_head_size": 16}
    if layout in (MLA, FP8_DS_MLA):
        sizes = {"num_heads": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 8, "qk_rope_head_dim": 64, "v_head_dim": 8}
    if layout == FP8_DS_MLA:
        sizes |= {"sparse_top_k": 4, "kv_cache_dtype": "fp8_ds_mla"}
    config = AttentionConfig(**sizes)
    problem = random_problem(0, config, layout, block_size=48, requests=[(1, 70), (5, 30)])
    cache = problem.written_cache()
    small = reblocked(cache, layout, config, 16)
    assert small.shape != cache.shape
    assert same_bits(reblocked(small, layout, config, 48), cache)
    slots = torch.arange(16 * small.shape[cache_shape(layout, config, 16).index("num_blocks")])
    for one, other in zip(*(gather_reference(c, layout, slots, config) for c in (cache, small)), strict=True):
        assert same_bits(one, other)
