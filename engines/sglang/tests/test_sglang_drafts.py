"""Drafts in SGLang: the trees of its NGRAM worker on attn-select's kernels, against float64 attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sglang_kernels import (
    CONTEXT,
    HEADS,
    KV_HEADS,
    REQUESTS,
    SIZE,
    Engine,
    attention,
    made,
    pytestmark,  # noqa: F401
    triton,
)
from torch import Tensor

from attn_select import ConfigError

DRAFTS = 4
"""Tokens that a step checks of each request: what is known, and drafts."""


def engine_of(page_size: int, seed: int) -> Engine:
    """Return an engine without windows that drafts by n-grams."""
    engine = Engine(page_size, seed, windows=(None, None))
    engine.runner.spec_algorithm = SimpleNamespace(is_none=lambda: False, is_ngram=lambda: True)
    return engine


def drawn_tree(engine: Engine) -> Tensor:
    """Return which nodes of a tree each of them sees, bool ``(DRAFTS, DRAFTS)``: itself and its ancestors."""
    seen = torch.eye(DRAFTS, dtype=torch.bool)
    for node in range(1, DRAFTS):
        seen[node] |= seen[engine.random.randrange(node)]
    return seen


def step_of(engine: Engine, chosen: list[int], fill: int = 0) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return a step that checks drafts of these requests, its tokens' K and V in each layer, and the trees.

    Args:
        fill: requests behind them that only fill a captured batch, without slots as SGLang's.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    slots = [slot for request in chosen for slot in engine.place(request, DRAFTS)]
    trees = [drawn_tree(engine) for _ in chosen]
    before = [engine.lens[request] for request in chosen]
    masks = [
        torch.cat([torch.ones(DRAFTS, length, dtype=torch.bool), tree], dim=1).flatten()
        for length, tree in zip(before, trees, strict=True)
    ]
    lens = torch.tensor(before + [1] * fill)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(lens),
        req_pool_indices=torch.tensor([request + 1 for request in chosen] + [0] * fill),
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens_cpu=None,
        out_cache_loc=torch.tensor(slots),
        spec_info=SimpleNamespace(draft_token_num=DRAFTS, custom_mask=torch.cat(masks)),
    )
    return batch, [torch.randn(len(lens) * DRAFTS, 2 * KV_HEADS, SIZE) for _ in engine.layers], trees


def check(engine: Engine, backend: Any, batch: Any, rows: list[Tensor], trees: list[Tensor], chosen: list[int]) -> None:
    """Run every layer and compare each draft with float64 attention to the context and its ancestors."""
    for layer, row, seen in zip(engine.layers, rows, engine.seen, strict=True):
        query = torch.randn(len(row), HEADS * SIZE)
        key, value = row.split(KV_HEADS, dim=1)
        output = backend.forward(query, key, value, layer, batch)
        parts = (each.split(DRAFTS) for each in (query, output, row))
        for request, tree, asked, given, own in zip(chosen, trees, *parts, strict=False):
            for node in range(DRAFTS):
                keys, values = torch.cat([seen[request], own[tree[node]]]).split(KV_HEADS, dim=1)
                wanted = attention(asked[node].view(1, HEADS, SIZE), keys, values, None, None).float()
                torch.testing.assert_close(given[node][None], wanted, rtol=1e-4, atol=1e-5)


def accept(engine: Engine, batch: Any, rows: list[Tensor], trees: list[Tensor], chosen: list[int]) -> None:
    """Accept a part of one path of each tree, and move its keys and values to the front as SGLang does."""
    for place, (request, tree) in enumerate(zip(chosen, trees, strict=True)):
        path = tree[engine.random.randrange(DRAFTS)].nonzero().flatten()
        slots = batch.out_cache_loc[place * DRAFTS : (place + 1) * DRAFTS]
        for buffer in (*engine.pool.k_buffer, *engine.pool.v_buffer):
            buffer[slots[: len(path)]] = buffer[slots[path]].clone()
        engine.lens[request] += len(path)
        for seen, row in zip(engine.seen, rows, strict=True):
            seen[request] = torch.cat([seen[request], row[place * DRAFTS + path]])


def begun(engine: Engine, backend: Any) -> list[int]:
    """Let every request compute a prompt; return the requests."""
    everyone = list(range(REQUESTS))
    batch, rows = engine.step(everyone, [5, 17, 1, 33, 8, 2])
    backend.init_forward_metadata(batch)
    engine.check(backend, batch, rows, everyone, batch.extend_seq_lens_cpu)
    return everyone


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["TORCH_SDPA", triton])
def test_drawn_trees(name: str, page_size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of drafts that are accepted in part, with chunks of prompts between them."""
    if name == "TRITON_ATTN" and page_size == 1:
        pytest.skip("TRITON_ATTN reads pages of 16 tokens and more")
    engine = engine_of(page_size, seed)
    backend, draw = made(engine, name, monkeypatch), engine.random
    everyone = begun(engine, backend)
    for _ in range(4 if name == "TRITON_ATTN" else 10):
        chosen = [request for request in everyone if engine.lens[request] < CONTEXT - 10]
        chosen = draw.sample(chosen, draw.randint(1, len(chosen)))
        if draw.random() < 0.2:
            lens = [draw.choice([1, 3, 9]) for _ in chosen]
            batch, rows = engine.step(chosen, lens)
            backend.init_forward_metadata(batch)
            engine.check(backend, batch, rows, chosen, lens)
            continue
        batch, rows, trees = step_of(engine, chosen)
        backend.init_forward_metadata(batch)
        check(engine, backend, batch, rows, trees, chosen)
        accept(engine, batch, rows, trees, chosen)


@pytest.mark.parametrize("name", [triton])
def test_captured_trees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is run again with what it was captured with, and batches are filled up to its size."""
    from attn_select_sglang.kernels import backend as module

    monkeypatch.setattr(module, "captures", lambda runner: True)
    engine = engine_of(16, 7)
    backend = made(engine, name, monkeypatch)
    backend.init_cuda_graph_state(4, 4 * DRAFTS)
    begun(engine, backend)
    for size in (2, 4):
        backend.init_forward_metadata_out_graph(step_of(engine, [0], size - 1)[0], in_capture=True)
    for chosen, fill in (([0, 3], 0), ([5, 1, 4], 1), ([3], 1), ([2, 5, 0, 1], 0)):
        batch, rows, trees = step_of(engine, chosen, fill)
        backend.init_forward_metadata_out_graph(batch)
        check(engine, backend, batch, rows, trees, chosen)
        accept(engine, batch, rows, trees, chosen)


def test_windows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft's place in the cache is not its position, which windows are measured by."""
    engine = Engine(16, 1)
    engine.runner.spec_algorithm = SimpleNamespace(is_none=lambda: False, is_ngram=lambda: True)
    with pytest.raises(ConfigError, match="the adapter serves no drafts with MLA or windows"):
        made(engine, "TORCH_SDPA", monkeypatch)
