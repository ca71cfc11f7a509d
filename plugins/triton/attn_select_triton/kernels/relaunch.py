"""Launching a compiled kernel again without what Triton does at every call to find it."""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from typing import Any

import triton

KNOWN = triton.__version__.startswith("3.6.")
"""Whether this Triton is one whose compiled kernels were seen to take all arguments, constants included."""


class Relaunch:
    """One specialisation of a kernel.

    ``function[grid](...)`` binds, specialises and hashes all arguments at every call. The compiled kernel that it
    returns is launched by itself from the second call on (as in Triton's tutorial on fused softmax).

    Args:
        function: what ``triton.jit`` or ``gluon.jit`` returned.
        options: ``num_warps`` and the like.

    The owner keeps one of these per specialisation: the calls of one differ neither in dtypes, constants and Nones,
    nor in what Triton specialises on, integers being 1 or multiples of 16 and addresses multiples of 16.
    """

    __slots__ = ("_compiled", "_function", "_options")

    def __init__(self, function: Any, **options: Any) -> None:
        self._function, self._options = function, options
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch with all of the kernel's arguments in order."""
        if self._compiled is not None:
            self._compiled[grid](*arguments)
            return
        compiled = self._function[grid](*arguments, **self._options)
        if KNOWN:  # Triton's interpreter returns None
            self._compiled = compiled
