"""What is checked of a step and of a call of layers that keep a state."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.errors import show
from attn_select.layer.state import StateConfig
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.states.state_pool import FROM_ZERO, StateSlots
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


def check_slots(config: StateConfig, common: CommonAttentionMetadata, slots: StateSlots, num_slots: int) -> None:
    """Raise BatchError for slots of another number of requests, outside the pool, or written twice."""
    count = common.num_reqs
    if not len(slots.read) == len(slots.write) == count:
        text = f"slots of {len(slots.read)} requests that read and {len(slots.write)} that write"
        raise BatchError(f"{text}, of a batch of {count}: accepted is one entry per request", hint="StatePool.step")
    lens = common.query_lens_cpu.tolist()
    for request, (writes, tokens) in enumerate(zip(slots.write, lens, strict=True)):
        if tokens < 1:
            raise BatchError(f"request {request} has {tokens} tokens: accepted are requests with tokens to run")
        if len(writes) not in (1, tokens) or len(writes) > config.max_decode_query_len:
            text = f"request {request} of {tokens} tokens writes {len(writes)} states"
            raise BatchError(f"{text}: accepted is 1, or in a decode with drafts one per token")
    written = [slot for writes in slots.write for slot in writes]
    if len(set(written)) < len(written):
        twice = next(slot for slot in written if written.count(slot) > 1)
        raise BatchError(f"slot {twice} is written twice in one step: accepted is a slot of its own for each state")
    for name, least, found in (("read", FROM_ZERO, slots.read), ("write", 0, written)):
        wrong = next((slot for slot in found if type(slot) is not int or not least <= slot < num_slots), None)
        if wrong is not None:
            raise BatchError(f"slot {show(wrong)} to {name}: accepted are integers from {least} to {num_slots - 1}")
    others = {slot: request for request, writes in enumerate(slots.write) for slot in writes}
    if others.keys().isdisjoint(slots.read):
        return
    # A request may read the slot that it writes: one that holds its state alone writes over it.
    for request, slot in enumerate(slots.read):
        if others.get(slot, request) != request:
            raise BatchError(
                f"request {request} reads slot {slot}, which request {others[slot]} writes in the same step"
            )


def check_same(what: str, planned: list[int], found: Tensor) -> None:
    """Compare a number of each request's, on the host, with the pool's."""
    if (seen := found.tolist()) != planned:
        request = next(i for i, pair in enumerate(zip(seen, planned, strict=True)) if pair[0] != pair[1])
        text = what.format(seen[request], planned[request])
        raise BatchError(f"request {request} {text} (accepted: the same)")


def check_weight(name: str, tensor: Tensor, device: torch.device, checked: bool) -> None:
    """Check the dtype and device of a layer's weight, and in checked mode that its numbers are finite."""
    if tensor.dtype not in PLAIN_DTYPES.values() or tensor.device != device:
        accepted = ", ".join(PLAIN_DTYPES)
        raise BatchError(f"{name} is {tensor.dtype} on {tensor.device}: accepted are {accepted} on {device}")
    if checked and not bool(tensor.isfinite().all()):
        raise BatchError(f"{name} holds NaN or infinity: accepted are finite numbers")


def check_decays(log_decay: Tensor, common: CommonAttentionMetadata) -> None:
    """Refuse a log-decay that is NaN or positive; minus infinity forgets everything."""
    rows = log_decay[: int(common.query_start_loc_cpu[-1])].flatten(1)
    wrong = ~(rows <= 0).all(dim=1)
    if bool(wrong.any()):
        token = int(wrong.int().argmax())
        request = int(torch.searchsorted(common.query_start_loc_cpu[1:], token, right=True))
        value = float(rows[token][~(rows[token] <= 0)][0])
        raise BatchError(f"log_decay[{token}] = {value} (of request {request}): accepted are numbers up to 0")
