"""The convolution before a recurrence: one filter per channel and SiLU, and the windows that it leaves behind.

The windows are written by a second launch, from copies: a request may write the slot that it reads, and the programs of
a launch run in any order.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.limits import power_of_two

CHANNELS = 1024  # Of a program at most: 8 of each of 128 threads


@triton.jit
def load_row(
    row, channels, inside, inputs_ptr, windows_ptr, read_slots_ptr, requests, stride_input, stride_slot, stride_row,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """Return channels of a row: of a request's window, zeros where it has none, or of an input behind the windows."""
    # Memory traffic: the row once.
    of_window = row < requests * BEFORE
    slot = tl.load(read_slots_ptr + row // BEFORE, mask=of_window, other=-1)
    kept = windows_ptr + slot * stride_slot + row % BEFORE * stride_row + channels
    new = inputs_ptr + (row - requests * BEFORE) * stride_input + channels
    # A row is one or the other: each load is masked where it is not its own.
    old_numbers = tl.load(kept, mask=inside & of_window & (slot >= 0), other=0.0)
    new_numbers = tl.load(new, mask=inside & (row >= requests * BEFORE), other=0.0)
    return tl.where(of_window, old_numbers, new_numbers)


@triton.jit(do_not_specialize=["requests", "tokens"])
def causal_conv_kernel(
    inputs_ptr, weight_ptr, bias_ptr, windows_ptr, read_slots_ptr, taps_ptr, window_rows_ptr, out_ptr, copies_ptr,
    requests, tokens, channels, stride_input, stride_slot, stride_row,
    TAPS: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and block of channels: first the outputs of the tokens, then copies of the new windows."""
    # Memory traffic: ``TAPS`` rows per output, most of them from L2, and every output and copy once.
    place = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    if place < tokens:
        found = tl.zeros((BLOCK,), tl.float32)
        if bias_ptr is not None:
            found += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            row = tl.load(taps_ptr + place.to(tl.int64) * TAPS + tap)
            numbers = load_row(
                row, channel, inside, inputs_ptr, windows_ptr, read_slots_ptr, requests, stride_input, stride_slot,
                stride_row, BEFORE,
            )  # fmt: skip
            weight = tl.load(weight_ptr + channel.to(tl.int64) * TAPS + tap, mask=inside, other=0.0)
            found += numbers.to(tl.float32) * weight.to(tl.float32)
        found = found / (1 + tl.exp(-found))
        out = out_ptr + place.to(tl.int64) * channels + channel
        tl.store(out, found.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        copy = (place - tokens).to(tl.int64)
        row = tl.load(window_rows_ptr + copy)
        numbers = load_row(
            row, channel, inside, inputs_ptr, windows_ptr, read_slots_ptr, requests, stride_input, stride_slot,
            stride_row, BEFORE,
        )  # fmt: skip
        tl.store(copies_ptr + copy * channels + channel, numbers, mask=inside)


@triton.jit
def write_windows_kernel(
    copies_ptr, windows_ptr, write_slots_ptr, slots, channels, stride_slot, stride_row,
    BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each copied row into the window of its slot; -1 is the last slot, which nobody reads."""
    # Memory traffic: each row read once, and written once.
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    slot = tl.load(write_slots_ptr + row // BEFORE)
    slot = tl.where(slot < 0, slots + slot, slot)
    numbers = tl.load(copies_ptr + row * channels + channel, mask=inside)
    tl.store(windows_ptr + slot * stride_slot + row % BEFORE * stride_row + channel, numbers, mask=inside)


def causal_conv(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    read_slots: Tensor,
    taps: Tensor,
    write_slots: Tensor,
    window_rows: Tensor,
) -> Tensor:
    """As ``attn_select.runtime.torch_ops.causal_conv``, in two launches."""
    (tokens, channels), width = inputs.shape, taps.shape[1]
    output = inputs.new_empty(inputs.shape)
    copies = windows.new_empty(window_rows.numel(), channels)
    if not tokens:
        return output
    block, before = min(CHANNELS, power_of_two(channels)), max(1, width - 1)
    blocks = triton.cdiv(channels, block)
    causal_conv_kernel[(tokens + len(copies), blocks)](
        inputs, weight.contiguous(), bias, windows, read_slots, taps, window_rows, output, copies,
        len(read_slots) if width > 1 else 0, tokens, channels, inputs.stride(0), windows.stride(0), windows.stride(1),
        TAPS=width, BEFORE=before, BLOCK=block, num_warps=4,
    )  # fmt: skip
    if len(copies):
        write_windows_kernel[(len(copies), blocks)](
            copies, windows, write_slots, windows.shape[0], channels, windows.stride(0), windows.stride(1),
            BEFORE=before, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return output
