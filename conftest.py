"""What every test process needs before torch and triton are imported."""

from __future__ import annotations

import os
import shutil

# On tensors as small as the tests' more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a GPU kernels run in Triton's interpreter, which must be on before anything imports triton.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
