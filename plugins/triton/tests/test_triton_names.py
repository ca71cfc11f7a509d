"""Kernels refer to what no other library changes."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import importlib, pkgutil, triton
triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
triton.cdiv = lambda x, y: -(-x // y)
import attn_select_triton.kernels as kernels
count = 0
for found in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
    for value in vars(importlib.import_module(found.name)).values():
        if isinstance(value, triton.JITFunction):
            value.cache_key  # looks at every name that the kernel's code refers to
            count += 1
print(count)
"""


def test_kernels_refer_to_no_function_that_sglang_replaces() -> None:
    """SGLang puts a plain function at ``triton.next_power_of_2`` (srt/utils/common.py 0.5.23); kernels refuse those."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", CODE], env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
