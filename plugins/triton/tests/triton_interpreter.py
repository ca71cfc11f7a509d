"""Triton's interpreter, which runs kernels without a GPU: faster, with the tests' NumPy, and with FP8 rounded right."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from typing import Any


def _teach_the_interpreter_numpy() -> None:
    """Give the interpreter's numbers an index: NumPy 2.4 takes arrays of one element for none."""
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _remember_builtins() -> None:
    """Look for the builtins of ``triton.language`` once, not again whenever a kernel calls a jitted function."""
    import triton.language as tl
    from triton.runtime import interpreter

    @functools.cache
    def names(package: Any) -> list[str]:
        return [name for name in dir(package) if tl.core.is_builtin(getattr(package, name))]

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in names(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _round_to_fp8() -> None:
    """Round float32 to FP8 as a GPU does: the interpreter loses the carry into the exponent."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    converted = interpreter._convert_float
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def convert(numbers: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source != tl.float32 or target not in kinds:
            return converted(numbers, source, target, rounding_mode)
        floats = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        return floats.to(kinds[target]).view(torch.uint8).numpy()

    interpreter._convert_float = convert


def _leave_out_unused_checks() -> None:
    """Compute no conditions of overflow: without ``debug``, which the interpreter never sets, nothing looks at them."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    _teach_the_interpreter_numpy()
    _remember_builtins()
    _round_to_fp8()
    _leave_out_unused_checks()
