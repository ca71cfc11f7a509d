"""One step of layers that keep a state: its decodes and prefills, the slots they read and write, their convolution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.layer.state import StateConfig
from attn_select.runtime.batch import to_device
from attn_select.runtime.metadata import CommonAttentionMetadata, split_by_phase
from attn_select.runtime.states.state_pool import StateSlots

Indices = npt.NDArray[np.int64]
NOWHERE = -1
"""The slot of a state that is not kept. Where it stands as an index, it is the last slot of ``StateGroup.allocate``,
which no request has."""


@dataclass(slots=True)
class StatePart:
    """The decodes of a step or its prefills: B requests and T tokens.

    Attributes:
        first_token: where its tokens begin in the step.
        num_tokens: T.
        query_start_loc: int32 ``(B + 1,)`` on the device, prefix sums of the query lengths, from 0.
        query_start_loc_cpu: the same on the host.
        max_query_len: the longest query.
        read_slots: int64 ``(B,)`` on the device, the slot of each request's state before the step; -1: it is zero.
        write_slots: int64 ``(B,)`` on the device, where the state behind a request's last token goes; ``NOWHERE`` for
            the padding of captured steps alone.
        token_slots: int64 ``(B, tokens)`` on the device, where the state behind each token goes, or ``NOWHERE``. None
            where no request keeps more than the last one.
    """

    first_token: int
    num_tokens: int
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    max_query_len: int
    read_slots: Tensor
    write_slots: Tensor
    token_slots: Tensor | None

    @property
    def num_reqs(self) -> int:
        """B."""
        return self.read_slots.shape[0]


@dataclass(slots=True)
class ConvIndices:
    """What the convolution of a step gathers, as rows of the requests' windows with the step's inputs behind them."""

    # All int64 on the device. ``(B,)``, as in ``StatePart``, of all requests; ``(T, conv_kernel_size)``, the rows that
    # each token sees, oldest first; ``(W,)``, the slots that get a new window; ``(W, conv_kernel_size - 1)``, the rows
    # of each.
    read_slots: Tensor
    taps: Tensor
    write_slots: Tensor
    windows: Tensor


@dataclass(slots=True)
class StateMetadata:
    """One step, the same for all layers of a kind. Treat as immutable.

    Attributes:
        group: the ``StateGroup`` that built it.
        num_actual_tokens: tokens of the step; what lies behind is neither read nor written.
        parts: the requests whose query is no longer than a decode's, and the others, where there are any.
        conv: what convolutions gather; None for layers without one.
        common, slots: what it was built of; None at fixed addresses, for graphs.
    """

    group: object
    num_actual_tokens: int
    parts: tuple[tuple[Phase, StatePart], ...]
    conv: ConvIndices | None
    common: CommonAttentionMetadata | None = None
    slots: StateSlots | None = None


def build_states(
    group: object, config: StateConfig, common: CommonAttentionMetadata, slots: StateSlots, device: torch.device
) -> StateMetadata:
    """Return the metadata of a step whose slots fit its batch. It reads host copies only."""
    # Raises BatchError where a decode stands behind a prefill.
    bounds = common.query_start_loc_cpu.numpy().astype(np.int64)
    parts: list[tuple[Phase, StatePart]] = []
    first = 0
    for phase, rows, own in split_by_phase(common, config.max_decode_query_len):
        last = first + own.num_reqs
        each = slots.write[first:last]
        columns = config.max_decode_query_len if any(len(writes) > 1 for writes in each) else 0
        part = StatePart(
            rows.start,
            own.num_actual_tokens,
            own.query_start_loc,
            own.query_start_loc_cpu,
            own.max_query_len,
            *slot_tables(slots.read[first:last], each, np.diff(bounds[first : last + 1]), columns, device),
        )
        parts.append((phase, part))
        first = last
    conv = _conv_indices(config.conv_kernel_size, bounds, slots, device) if config.conv_kernel_size else None
    return StateMetadata(group, common.num_actual_tokens, tuple(parts), conv, common, slots)


def slot_tables(
    read: list[int], write: list[list[int]], query_lens: Iterable[int], columns: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the slots of ``StatePart``; ``columns``: of the slots of each token, 0: there are none."""
    last = torch.tensor([writes[-1] for writes in write], dtype=torch.int64)
    found = to_device(torch.tensor(read, dtype=torch.int64), device), to_device(last, device)
    if not columns:
        return *found, None
    table = np.full((len(read), columns), NOWHERE, dtype=np.int64)
    for row, (writes, end) in enumerate(zip(write, query_lens, strict=True)):
        table[row, end - len(writes) : end] = writes  # one slot belongs to the last token, whichever it is
    return *found, to_device(torch.from_numpy(table), device)


def _conv_indices(width: int, bounds: Indices, slots: StateSlots, device: torch.device) -> ConvIndices:
    """Return what a convolution of ``width`` tokens gathers in a step."""
    taps, windows = conv_rows(width, bounds, [len(writes) for writes in slots.write])
    written = torch.tensor([slot for writes in slots.write for slot in writes], dtype=torch.int64)
    read = torch.tensor(slots.read, dtype=torch.int64)
    return ConvIndices(*(to_device(each, device) for each in (read, taps, written, windows)))


def conv_rows(width: int, bounds: Indices, written: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return ``ConvIndices.taps`` and ``ConvIndices.windows`` on the host; ``written``: states kept of each request."""
    # First come the windows of all requests, ``width - 1`` rows each, then the step's inputs.
    count, before = len(bounds) - 1, width - 1
    lens = np.diff(bounds)
    request = np.repeat(np.arange(count), lens)
    offset = np.arange(bounds[-1]) - bounds[request]

    def rows(request: Indices, last: Indices, taps: int) -> Tensor:
        """Return the rows of the ``taps`` inputs that end with input ``last`` of each request."""
        place = last[:, None] - (taps - 1) + np.arange(taps)
        # Inputs before the step's first (negative places) are in the request's window, whose last row is place -1.
        in_window = request[:, None] * before + before + place
        in_step = count * before + bounds[request][:, None] + place
        return torch.from_numpy(np.where(place < 0, in_window, in_step))

    owners = np.repeat(np.arange(count), written)
    last = np.concatenate([np.arange(n - kept, n) for n, kept in zip(lens, written, strict=True)])
    return rows(request, offset, width), rows(owners, last, before)
