"""What the tests of the adapter share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``TORCH_SDPA`` read pages, as every backend of a GPU does."""
    from attn_select_transformers import dense

    monkeypatch.setattr(dense, "TAKES_DENSE", frozenset())


@pytest.fixture
def calls(pages: None, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what our attention function did: ``dense`` and ``paged`` calls, and calls of our kernels."""
    from attn_select.runtime import Attention
    from attn_select_transformers import dense, paged

    counted: Counter[str] = Counter()

    def count(owner: Any, name: str, as_: str) -> None:
        original = getattr(owner, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            counted[as_] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    count(dense, "attend", "dense")
    count(paged, "attend", "paged")
    count(Attention, "forward", "kernel")
    count(dense, "_masked_by_torch", "torch")
    return counted
