"""The fixture that puts emulated functions in the place of an installed distribution's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from attn_select.testing.toolkit import emulated_modules


@pytest.fixture
def emulate() -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Return a function that replaces a distribution's module with an emulated one, and returns the list of calls."""
    torch = pytest.importorskip("torch")
    import cutlass_mla_emulated

    from attn_select_cutlass_mla.runtime.adapters import adapter_for

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors as small as these more of them wait for each other
    with ExitStack() as stack:

        def install(distribution: str) -> list[dict[str, Any]]:
            name, functions = cutlass_mla_emulated.MODULES[distribution]
            stack.enter_context(emulated_modules({name: functions}))
            adapter_for.cache_clear()
            cutlass_mla_emulated.calls.clear()
            calls: list[dict[str, Any]] = cutlass_mla_emulated.calls
            return calls

        yield install
    adapter_for.cache_clear()
    torch.set_num_threads(threads)
