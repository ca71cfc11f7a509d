"""``examples/serve.py``: an engine that shares, preempts and frees blocks computes what one without a cache does."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attn_select.runtime import AttentionGroup, BatchError, BlockPool, BlockTable

ROOT = Path(__file__).resolve().parents[2]
PROGRAM, DOCUMENT = ROOT / "examples" / "serve.py", ROOT / "docs" / "runtime.md"


@pytest.fixture(scope="module")
def serve() -> Iterator[ModuleType]:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("examples_serve", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["examples_serve"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["examples_serve"]


@pytest.mark.parametrize("seed", [0, 1])
def test_it_serves_what_no_cache_would(
    serve: ModuleType, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")
    counts, _ = serve.main(["--seed", str(seed)])
    assert counts.prefill_chunks > 16  # prompts came in more than one chunk, or again after a preemption
    assert counts.preemptions
    assert counts.cached_prefix_tokens
    assert bool(counts.graph_steps) == torch.cuda.is_available()
    printed = capsys.readouterr().out
    assert "24 free at the end" in printed
    assert "as without a cache" in printed
    if seed == 0 and not torch.cuda.is_available():
        shown = re.findall(r"```text\n\$ python examples/serve\.py\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
        rounded = re.compile(r"error is \S+,")  # differs between processors
        assert [rounded.sub("", printed)] == [rounded.sub("", output) for output in shown]


@pytest.mark.parametrize("checked", [True, False])
def test_rows_that_are_not_cleared_do_not_pass(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Checked mode names the row; unchecked, the example's own comparison fails."""
    monkeypatch.setenv("ATTN_SELECT_CHECK", str(int(checked)))
    monkeypatch.setattr(BlockTable, "clear_row", lambda *_: None)
    with pytest.raises(BatchError if checked else SystemExit, match="is stale" if checked else "1"):
        serve.main(["--requests", "10", "--num-blocks", "60"])


def test_blocks_are_zeroed_before_a_kernel_that_needs_it_reads_them(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer, and no block that is in use: the comparison at the end still holds."""
    handed_out: list[int] = []
    zeroed: list[list[int]] = []
    allocate, zero = BlockPool.allocate, AttentionGroup.zero_blocks

    def noting_allocate(pool: BlockPool, *arguments: Any) -> Any:
        added = allocate(pool, *arguments)
        handed_out.extend(added)
        return added

    def noting_zero(group: AttentionGroup, cache: torch.Tensor, ids: list[int]) -> None:
        zeroed.append(list(ids))
        zero(group, cache, ids)

    monkeypatch.setattr(BlockPool, "allocate", noting_allocate)
    monkeypatch.setattr(AttentionGroup, "zero_blocks", noting_zero)
    monkeypatch.setattr(AttentionGroup, "nan_tail_safe", False)
    counts, _ = serve.main(["--requests", "8", "--num-blocks", "12"])
    assert counts.preemptions
    layers = serve.NUM_LAYERS
    for layer in range(layers):
        assert [block for ids in zeroed[layer::layers] for block in ids] == handed_out


@pytest.mark.parametrize("seed", range(20))
def test_the_scheduler_always_comes_to_an_end(serve: ModuleType, seed: int) -> None:
    """In the smallest cache that holds each request alone, some request gets a token every few steps."""
    requests = serve.workload(12, seed)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    pool = BlockPool(-(-longest // serve.BLOCK_SIZE) + seed % 3, serve.BLOCK_SIZE)
    table = BlockTable(serve.CAPACITY.max_num_seqs, 32, serve.BLOCK_SIZE, "cpu")
    scheduler = serve.Scheduler(pool, table)
    engine, logits = SimpleNamespace(scheduler=scheduler), torch.zeros(1)
    scheduler.waiting.extend(requests)
    most = -(-serve.CAPACITY.max_model_len // serve.CAPACITY.max_num_batched_tokens)
    without_token = tokens = 0
    while scheduler.waiting or scheduler.running:
        scheduled = scheduler.schedule()
        for request in scheduler.running[: len(scheduled)]:
            serve.Engine.advance(engine, request, request.num_computed + scheduled[request.name], logits)
        before, tokens = tokens, sum(len(request.generated) for request in requests)
        without_token = 0 if tokens > before else without_token + 1
        assert without_token <= most
    assert scheduler.counts.preemptions
    assert all(request.finished for request in requests)


def test_a_gpu_says_what_it_waits_for_before_the_engine_is_made(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []

    class Stop(Exception):
        pass

    def engine(*_: Any) -> None:
        printed.append(capsys.readouterr().out)
        raise Stop

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(serve, "Engine", engine)
    with pytest.raises(Stop):
        serve.main([])
    assert "kernels compile" in printed[0]


def test_a_cache_too_small_for_a_request_is_an_error(serve: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--num-blocks", "4"])
    assert "--num-blocks 4: a request of" in capsys.readouterr().err
