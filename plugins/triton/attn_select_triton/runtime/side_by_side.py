"""Compiling what launches lack side by side, for ``AttentionGroup.warm_up`` and ``compile_ahead``."""

# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported, misc"

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from triton import knobs

from attn_select.runtime.backend import Progress
from attn_select_triton.kernels.relaunch import compile_only

# Most of a compilation is LLVM's and ptxas's work, for which Python's lock is not held; the rest takes turns.
MOST_THREADS = 8


@contextmanager
def compiling(progress: Progress) -> Iterator[None]:
    """Compile the kernels that launches lack, in threads, and run none of them; ends when all are compiled."""
    # A launch whose kernel is there already runs. What the compiler raised first goes on to the caller.
    from triton.runtime._async_compile import AsyncCompileMode, active_mode

    names: dict[Future[Any], str] = {}

    def note(function: Any, kernel: Any) -> None:
        future = getattr(kernel, "future", None)
        if future is not None:
            names[future] = function.fn.__name__

    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "triton-compile") as threads:
        mode = AsyncCompileMode(threads)
        try:
            with mode:
                with compile_only(note):
                    yield
                for done, future in enumerate(as_completed(names), 1):
                    future.result()
                    progress(names[future], done, len(names))
        finally:
            active_mode.set(None)  # Triton leaves it where a compilation fails


# ``compiling``; None with a Triton that does not compile in threads, and in its interpreter.
COMPILING = compiling if find_spec("triton.runtime._async_compile") and not knobs.runtime.interpret else None
