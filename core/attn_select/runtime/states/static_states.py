"""``StaticStates``: the slots of captured decodes at fixed addresses."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.runtime.metadata import CommonAttentionMetadata, check_uniform
from attn_select.runtime.states.state_batch import (
    NOWHERE,
    ConvIndices,
    StateMetadata,
    StatePart,
    conv_rows,
    slot_tables,
)
from attn_select.runtime.states.state_group import StateGroup
from attn_select.runtime.states.state_pool import FROM_ZERO, StateSlots


class StaticStates:
    """Decodes of one length, padded with requests that read no slot and write nowhere.

    Args:
        group: made with ``cuda_graphs=True``.
        query_len: tokens per request.
        largest: requests of the largest batch.
    """

    def __init__(self, group: StateGroup, query_len: int, largest: int) -> None:
        self.group, self.query_len = group, query_len
        self._slots = self._tables([], [], largest)
        self._made: dict[int, StateMetadata] = {}

    def padded_tokens(self, size: int) -> int:
        """Return how many tokens a batch of ``size`` requests has."""
        return size * self.query_len

    def metadata(self, size: int) -> StateMetadata:
        """Return the metadata of all batches of ``size`` requests: always the same tensors, since graphs read them."""
        if size not in self._made:
            self._made[size] = self._metadata(size)
        return self._made[size]

    def load(self, common: CommonAttentionMetadata, slots: StateSlots, size: int) -> None:
        """Copy a batch's slots into the buffers, padded to ``size`` requests, and commit the pool's step. Does not
        synchronise.

        Raises:
            BatchError: the slots do not fit the batch, or a query has another length.
            PoolError: as ``StateGroup.build``.
        """
        with self.group.checked_step(common, slots, seen=False):  # replays pass by the layers
            check_uniform(common, self.query_len)
            for kept, table in zip(self._slots, self._tables(slots.read, slots.write, size), strict=True):
                if kept is not None and table is not None:
                    kept[:size].copy_(table)

    def _tables(self, read: list[int], write: list[list[int]], size: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return slots on the device, padded to ``size`` requests."""
        rest, columns = size - len(read), self.query_len if self.query_len > 1 else 0
        padded = read + [FROM_ZERO] * rest, write + [[NOWHERE]] * rest
        return slot_tables(*padded, [self.query_len] * size, columns, self.group.device)

    def _metadata(self, size: int) -> StateMetadata:
        device, each = self.group.device, self.query_len
        bounds = torch.arange(size + 1, dtype=torch.int32) * each
        read, write, each_token = self._slots
        read, write, tokens = read[:size], write[:size], None if each_token is None else each_token[:size]
        part = StatePart(0, size * each, bounds.to(device), bounds, each, read, write, tokens)
        conv = None
        if width := self.group.config.conv_kernel_size:
            taps, windows = conv_rows(width, bounds.long().numpy(), [each] * size)
            written = write if tokens is None else tokens.view(-1)
            conv = ConvIndices(read, taps.to(device), written, windows.to(device))
        return StateMetadata(self.group, size * each, (("decode", part),), conv)
