"""What context parallelism is said to cost and save."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select import AttentionConfig, select
from attn_select.times.ranks import collectives_us

MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def config(ranks: int = 2, **fields: Any) -> AttentionConfig:
    given = fields or {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
    return AttentionConfig(**given, decode_context_parallel_size=ranks)


def test_layers_of_one_rank_cost_nothing() -> None:
    selection = select(config(1), "h200")
    assert selection.rank_costs is None
    assert selection.to_dict()["plan"]["ranks"] is None
    assert "Ranks" not in selection.explain()


@pytest.mark.parametrize(
    ("tokens", "heads", "measured_us"),
    [(1, 32, 7.87), (32, 32, 10.62), (512, 32, 36.54), (2048, 32, 116.18)],
)
def test_collectives_are_those_that_were_measured(tokens: int, heads: int, measured_us: float) -> None:
    layer = config(num_heads=heads, num_kv_heads=8, head_size=128)
    assert collectives_us(layer, tokens) == pytest.approx(measured_us, rel=0.2)


@pytest.mark.parametrize(
    ("tokens", "measured_us"), [(1, 9.65), (32, 24.12), (128, 64.13), (512, 262.67 + 200.13), (2048, 968.5 + 703.65)]
)
def test_collectives_of_latents(tokens: int, measured_us: float) -> None:
    """The last two are more than the shared memory holds, and go by NCCL."""
    assert collectives_us(config(num_heads=64, **MLA), tokens) == pytest.approx(measured_us, rel=0.2)


def test_a_decode_that_reads_memory_is_shared_and_pays_from_some_context_on() -> None:
    selection = select(config(2), "h200", workload="1q1s128k,8q1s128k")
    costs = selection.rank_costs
    assert costs is not None
    assert (costs.ranks, costs.bytes_per_token, selection.bytes_per_token) == (2, 2048, 4096)
    one, eight = costs.steps
    for step in costs.steps:
        assert step.ranks_us == pytest.approx(step.alone_us / 2, rel=0.01)
    assert one.pays_from is not None
    assert eight.pays_from is not None
    assert 8_000 < one.pays_from < 32_768  # 128 Ki tokens are read in 112 us, and 8.6 us are added
    assert eight.pays_from < one.pays_from
    found = selection.to_dict()["plan"]["ranks"]
    assert found["steps"][0]["pays_from"] == one.pays_from
    assert f"pays from {one.pays_from} tokens of context on" in selection.explain()


def test_heads_that_keep_each_rank_busy_save_no_time() -> None:
    """128 heads of a latent are bound by products: every rank has as many of them as before."""
    selection = select(config(4, num_heads=128, **MLA), "h200")
    costs = selection.rank_costs
    assert costs is not None
    assert [step.pays_from for step in costs.steps] == [None]
    assert "saves memory, no time" in selection.explain()
