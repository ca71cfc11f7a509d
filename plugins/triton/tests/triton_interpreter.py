"""Triton's interpreter, which runs kernels without a GPU, made to work with the NumPy of the tests. Import it once."""

from __future__ import annotations

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


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    _teach_the_interpreter_numpy()
