"""A kernel that writes behind the end of a tensor: what ``sanitize.py`` must find before it is believed."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def planted_kernel(out_ptr, SIZE: tl.constexpr):
    """Write ``SIZE`` numbers per program."""
    tl.store(out_ptr + tl.program_id(0) * SIZE + tl.arange(0, SIZE), 1.0)


if __name__ == "__main__":
    planted_kernel[(2,)](torch.zeros(128, device="cuda"), 128)
    torch.cuda.synchronize()
