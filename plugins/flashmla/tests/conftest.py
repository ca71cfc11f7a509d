"""The fixture that puts an emulated build in the place of an installed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from attn_select.testing.toolkit import emulated_modules


@pytest.fixture
def emulate() -> Iterator[Callable[[str], list[str]]]:
    """Return a function that replaces a distribution's modules with emulated ones, and returns the list of calls."""
    torch = pytest.importorskip("torch")
    import flashmla_emulated

    from attn_select_flashmla.runtime.adapters import adapter_of

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors as small as these more of them wait for each other
    with ExitStack() as stack:

        def install(distribution: str) -> list[str]:
            stack.enter_context(emulated_modules(flashmla_emulated.MODULES[distribution]))
            adapter_of.cache_clear()
            flashmla_emulated.calls.clear()
            calls: list[str] = flashmla_emulated.calls
            return calls

        yield install
    adapter_of.cache_clear()
    torch.set_num_threads(threads)
