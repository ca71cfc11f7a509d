"""What Triton hashes once per process, begun when a backend is loaded."""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import threading
from functools import cache

from triton.runtime import cache as triton_cache

from attn_select.machine.detection import detect_device


@cache
def begin_hashing() -> threading.Thread | None:
    """Begin hashing Triton's own library, 415 MB that the first launch reads for the keys of its cache of kernels."""
    # It takes 0.34 s on a machine with an H100, in a thread that holds Python's lock for little of it, while the
    # model's weights are read. A launch that does not wait for it hashes too, and finds the same.
    # Returns the thread; None without a GPU, or where this Triton has no such function, which is not part of its
    # interface.
    hashing = getattr(triton_cache, "triton_key", None)
    if hashing is None or detect_device().device.is_cpu:
        return None
    thread = threading.Thread(target=hashing, name="triton_key")
    thread.start()
    return thread
