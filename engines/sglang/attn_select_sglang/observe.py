"""Watching SGLang's steps where its scheduler runs them: whatever backend computes attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attn_select.engines.adapter import MOVED, Adapter
from attn_select.engines.observed import ObservedSteps

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
"""What runs one step; called in the scheduler's process alone."""


def before(adapter: Adapter, steps: ObservedSteps) -> Callable[..., None]:
    """Return the hook that SGLang calls before ``Scheduler.run_batch``, with the same arguments."""
    watching = True

    def run_batch(scheduler: Any, batch: Any, *arguments: Any, **options: Any) -> None:
        nonlocal watching
        if watching:
            try:
                steps.count(*lengths_of(batch, scheduler.server_args.speculative_num_draft_tokens))
            except MOVED as error:
                watching = False
                adapter.interface_moved(error)

    return run_batch


def lengths_of(batch: Any, drafts: int | None) -> tuple[Sequence[int], Sequence[int]]:
    """Return new tokens, and all tokens, of each request of a ``ScheduleBatch``; nothing where none is computed."""
    # ``drafts``: tokens that a speculative decode verifies for each request (``speculative_num_draft_tokens``).
    mode = batch.forward_mode
    if mode.is_idle() or mode.is_prebuilt():
        return [], []
    if mode.is_extend():
        new = batch.extend_lens
        return new, [cached + more for cached, more in zip(batch.prefix_lens, new, strict=True)]
    verified = 1 if batch.spec_algorithm.is_none() else drafts or 1
    return [verified] * len(batch.reqs), [request.seqlen + verified - 1 for request in batch.reqs]
