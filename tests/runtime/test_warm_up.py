"""``AttentionGroup.warm_up``: the steps it runs, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attn_select import AttentionConfig, select  # noqa: E402
from attn_select.runtime import Attention, Capacity, MLAAttention, attention_group  # noqa: E402
from attn_select.runtime.warm_up import batch_of, steps_of  # noqa: E402

GQA = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LAYERS: dict[str, dict[str, Any]] = {
    "decoder": GQA,
    "sinks and window": {**GQA, "sinks": True, "sliding_window": 16},
    "chunks": {**GQA, "attention_chunk_size": 32},
    "encoder": {**GQA, "attn_type": "encoder_only"},
    "cross-attention": {**GQA, "attn_type": "encoder_decoder"},
    "drafts": {**GQA, "num_speculative_tokens": 3},
    "trees of drafts": {**GQA, "num_speculative_tokens": 3, "draft_tree": True},
    "MLA": {"num_heads": 4, "dtype": "float32", **LATENT},
    "sparse MLA": {"num_heads": 4, "dtype": "float32", "sparse_top_k": 8, **LATENT},
}


def group_with_layer(fields: dict[str, Any], capacity: Capacity) -> tuple[Any, Any]:
    config = AttentionConfig(**fields)
    group = attention_group(select(config, device="cpu"), capacity=capacity)
    if config.mla:
        heads, rank = config.num_heads, config.kv_lora_rank
        return group, MLAAttention(group, torch.randn(heads * 32, rank))
    return group, Attention(group, sinks=torch.zeros(4) if config.sinks else None)


@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("capacity", [Capacity(4, 64, 128), Capacity(1, 1, 1)], ids=str)
def test_layers_of_all_kinds_are_warmed_up(fields: dict[str, Any], capacity: Capacity) -> None:
    group, layer = group_with_layer(fields, capacity)
    told: list[tuple[str, int, int]] = []
    done = group.warm_up(lambda *each: told.append(each))
    assert done.steps == len(told) > 0
    assert [each[1:] for each in told] == [(number, done.steps) for number in range(1, done.steps + 1)]
    assert done.kernels == 0
    assert layer.group is group


def test_decodes_with_and_without_a_tree_are_warmed_up_and_captured_ones_have_one() -> None:
    config = AttentionConfig(**GQA, num_speculative_tokens=3, draft_tree=True)
    steps = steps_of(config, (8, 512, 4096), {"decode", "prefill"}, mixed=True, captured=True)
    seen = {(query, step.tree, step.captured) for step in steps for query, _ in step.requests if query <= 4}
    assert seen == {
        *((1, False, False), (1, True, True), (2, False, False)),
        *((4, False, False), (4, True, False), (4, True, True)),
    }
    for step in steps:
        mask = batch_of(step, config, 16, torch.device("cpu")).tree_mask
        assert (mask is not None) == step.tree
        assert mask is None or mask.shape == (sum(query for query, _ in step.requests), 4)


def test_kernels_are_compiled_before_the_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    group, _ = group_with_layer(GQA, Capacity(4, 64, 128))
    events: list[str] = []

    @contextmanager
    def compiling(progress: Any) -> Any:
        events.append("compiling")
        yield
        progress("kernel", 1, 1)
        events.append("compiled")

    monkeypatch.setattr(group.distinct[0].backend, "compiling", staticmethod(compiling))
    done = group.warm_up(lambda name, *_: events.append(name))
    assert events[:3] == ["compiling", "kernel", "compiled"]
    assert (done.kernels, done.steps) == (1, len(events) - 3)


def warmed(group: Any, layer: Any) -> tuple[list[str], list[int]]:
    """Warm a group of this layer up; return the steps' names, and the requests of each step that was captured."""
    assert layer.group is group
    names: list[str] = []
    captured: list[int] = []
    blocks: list[int] = []
    capture, allocate = group.build_for_cudagraph_capture, group.allocate_kv_cache

    def allocated(num_blocks: int) -> Any:
        blocks.append(num_blocks)
        return allocate(num_blocks)

    def counted(common: Any) -> Any:
        captured.append(common.num_reqs)
        return capture(common)

    group.build_for_cudagraph_capture, group.allocate_kv_cache = counted, allocated
    group.warm_up(lambda name, *_: names.append(name))
    assert blocks == [1]
    return names, captured


@pytest.mark.parametrize(
    ("level", "options", "expected"),
    [
        ("UNIFORM_SINGLE_TOKEN_DECODE", {"cuda_graphs": True}, True),
        ("ALWAYS", {"cuda_graphs": True}, True),
        ("NEVER", {"cuda_graphs": True}, False),
        ("ALWAYS", {"cuda_graphs": False}, False),
        ("ALWAYS", {"cuda_graphs": True, "phases": ("prefill",)}, False),
    ],
)
def test_decodes_are_captured_where_serving_captures_them(
    make_toy: Callable[..., Any], make_group: Callable[..., Any], level: str, options: dict[str, Any], expected: bool
) -> None:
    group = make_group(AttentionConfig(**GQA), make_toy(level=level), capacity=Capacity(4, 128, 128), **options)
    names, captured = warmed(group, Attention(group))
    assert len(captured) == len([name for name in names if name.endswith(", captured")])
    assert bool(captured) is expected


def test_decodes_and_prefills_are_mixed_where_one_backend_takes_both(
    make_toy: Callable[..., Any], make_group: Callable[..., Any]
) -> None:
    config, capacity = AttentionConfig(**GQA), Capacity(4, 128, 128)
    mixed = "3 x 1 tokens over 128 keys and 1 x 64 tokens over 64 keys"
    both = make_group(config, make_toy(), capacity=capacity)
    assert mixed in warmed(both, Attention(both))[0]
    apart = make_group(
        config, make_toy("DECODER", phases=("decode",)), make_toy("PREFILLER", phases=("prefill",)), capacity=capacity
    )
    names = warmed(apart, Attention(apart))[0]
    assert names
    assert not [name for name in names if " and " in name]
    group, layer = group_with_layer(LAYERS["MLA"], capacity)
    group.unified = False  # as with two backends, which MLA layers have in most batches
    assert mixed in warmed(group, layer)[0]
