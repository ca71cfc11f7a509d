"""``examples/serve.py``: an engine that shares, preempts and frees blocks computes what one without a cache does."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attn_select.runtime import Attention, BatchError, BlockTable

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
        shown = re.findall(r"```\n\$ python examples/serve\.py\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
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


def test_layers_that_take_each_others_metadata_do_not_pass(serve: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Attention.forward

    def swapped(layer: Attention, *arguments: Any) -> Any:
        *tensors, metadata = arguments
        serve_groups[metadata.group] = metadata
        return call(layer, *tensors, next(iter(serve_groups.values())))

    serve_groups: dict[Any, Any] = {}
    monkeypatch.setattr(Attention, "forward", swapped)
    with pytest.raises(BatchError, match="attn_metadata was built by another group"):
        serve.main(["--requests", "2", "--no-graphs"])


def test_a_cache_too_small_for_a_request_is_an_error(serve: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--num-blocks", "4"])
    assert "--num-blocks 4: a request of" in capsys.readouterr().err
