"""The kernel's scratch: partial results of split requests."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.runtime.backend import BackendContext
from attn_select.runtime.metadata import BatchError
from attn_select_cutlass_mla.runtime.adapters import PAGE, Adapter

B200_SMS = 148
"""Multiprocessors that are assumed on a CPU, where kernels are emulated: as many as a B200 has."""


# How many parts a request is split into may grow as batches shrink, so every batch size is asked about. A table
# wider than ``max_model_len`` needs may ask for more: then it grows, unless captured graphs hold its address.
class Workspace:
    """Scratch that all layers of a kind share, reserved for the largest batch."""

    def __init__(self, adapter: Adapter, context: BackendContext, least: int) -> None:
        device = context.device
        self._adapter, self._fixed = adapter, context.cuda_graphs
        on_gpu = device.type == "cuda"
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else B200_SMS
        self._known: dict[tuple[int, int], int] = {}
        width = -(-context.max_model_len // PAGE)
        most = max(self._bytes(requests, width) for requests in range(1, context.max_num_seqs + 1))
        self._buffer = torch.empty(max(least, most), dtype=torch.uint8, device=device)

    def for_batch(self, requests: int, width: int) -> Tensor:
        """Return uint8 memory for B requests whose tables have ``width`` pages."""
        reserved = self._buffer.shape[0]
        if requests and (needed := self._bytes(requests, width)) > reserved:
            if self._fixed:
                raise BatchError(
                    f"a batch of {requests} requests with block_table_tensor of {width} blocks needs a workspace of "
                    f"{needed} bytes: {reserved} are reserved, and CUDA graphs hold their address",
                    hint=f"set backends.CUTLASS_MLA.workspace_bytes = {needed}, or pass narrower tables",
                )
            self._buffer = torch.empty(needed, dtype=torch.uint8, device=self._buffer.device)
        return self._buffer

    def _bytes(self, requests: int, width: int) -> int:
        found = self._known.get((requests, width))
        if found is None:
            found = self._adapter.workspace_bytes(PAGE * width, requests, self._sms)
            self._known[requests, width] = found
        return found
