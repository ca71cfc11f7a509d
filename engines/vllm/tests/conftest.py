"""Emulated vLLM for tests of the adapter without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest
import triton_interpreter  # noqa: F401
import vllm_emulated

from attn_select import clear_cache


@pytest.fixture
def vllm() -> Iterator[Callable[..., Any]]:
    """A function from a ``VllmConfig`` and a version to the emulated vLLM, which it puts in place for the test."""
    if find_spec("vllm") is not None:
        pytest.skip("vLLM itself is installed")
    pytest.importorskip("torch")
    with ExitStack() as stack:
        yield lambda config, version="0.32.0": stack.enter_context(vllm_emulated.emulated_vllm(config, version))
    clear_cache()  # rules and variables were the test's
