"""The fixture that puts an emulated build in the place of an installed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Return a function that replaces a provider's module with an emulated one, and returns the list of its calls."""
    pytest.importorskip("torch")
    import flash_attn_emulated

    from attn_select_flash_attn.runtime.adapters import adapter_for

    adapter_for.cache_clear()
    yield lambda provider: flash_attn_emulated.install(monkeypatch, provider)
    adapter_for.cache_clear()
