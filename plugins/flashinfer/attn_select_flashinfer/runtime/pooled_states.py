"""``PooledStateBackend``: FlashInfer's kernels that read and write states in the pool."""

from __future__ import annotations

from attn_select.runtime.states import StateBackend
from attn_select_flashinfer.runtime import library


class PooledStateBackend(StateBackend):
    """A subclass sets ``impl_cls``. The kernels know no slot below 0."""

    reads_zeros = True

    @classmethod
    def prepare(cls) -> None:
        """Import the library."""
        library.flashinfer()
