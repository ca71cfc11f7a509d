"""Watching SGLang's steps where its scheduler runs them: whatever backend computes attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
"""What runs one step; called in the scheduler's process alone."""


def before(count: Callable[[Any, Any], None]) -> Callable[..., None]:
    """Return the hook that SGLang calls before ``Scheduler.run_batch``, with the same arguments."""

    def run_batch(scheduler: Any, batch: Any, *arguments: Any, **options: Any) -> None:
        count(scheduler, batch)

    return run_batch


def lengths_of(scheduler: Any, batch: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return new tokens, and all tokens, of each request of a ``ScheduleBatch``; nothing where none is computed."""
    # Tokens that a speculative decode verifies for each request.
    drafts: int | None = scheduler.server_args.speculative_num_draft_tokens
    mode = batch.forward_mode
    if mode.is_idle() or mode.is_prebuilt():
        return [], []
    if mode.is_extend():
        new = batch.extend_lens
        return new, [cached + more for cached, more in zip(batch.prefix_lens, new, strict=True)]
    verified = 1 if batch.spec_algorithm.is_none() else drafts or 1
    return [verified] * len(batch.reqs), [request.seqlen + verified - 1 for request in batch.reqs]
