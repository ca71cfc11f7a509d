"""What is checked of a step and of a call of layers that keep a state."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_select.layer.state import StateConfig
from attn_select.runtime.checks import request_of
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.states.state_pool import StateSlots
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


def check_step(config: StateConfig, common: CommonAttentionMetadata, slots: StateSlots, num_slots: int) -> None:
    """Raise BatchError for a step of a larger pool, of one for more drafts, or of other numbers of tokens."""
    pool, drafts = slots.pool, config.num_speculative_tokens
    if pool.num_slots > num_slots:
        text = f"the slots are of a pool of {pool.num_slots}: the group's layers have {num_slots} slots"
        raise BatchError(text, hint="StatePool(group.num_slots)")
    if pool.num_speculative_tokens > drafts:
        text = f"the slots are of a pool with num_speculative_tokens = {pool.num_speculative_tokens}"
        raise BatchError(f"{text}: accepted is the layers', {drafts}", hint="StatePool(num_slots, drafts)")
    if len(slots.num_tokens) != common.num_reqs:
        raise BatchError(f"slots of {len(slots.num_tokens)} requests, of a batch of {common.num_reqs}")
    what = "has {} tokens in the batch, and {} by the pool's step"
    check_same(what, [*slots.num_tokens.values()], common.query_lens_cpu)


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
        request = request_of(token, common)
        value = float(rows[token][~(rows[token] <= 0)][0])
        raise BatchError(f"log_decay[{token}] = {value} (of request {request}): accepted are numbers up to 0")
