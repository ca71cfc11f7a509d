"""Watching vLLM's steps where they are scheduled, on the host of the engine's core: whatever backend runs them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from attn_select.engines.adapter import MOVED, Adapter
from attn_select.engines.observed import ObservedSteps

_MARK = "_attn_select_observed"


def watch(adapter: Adapter, steps: ObservedSteps) -> None:
    """Count every step that vLLM schedules in this process; nothing happens the second time."""
    original = Scheduler.schedule
    if hasattr(original, _MARK):
        return
    watching = True

    @functools.wraps(original)
    def schedule(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal watching
        output = original(self, *arguments, **options)
        if watching:
            try:
                steps.count(*lengths_of(output))
            except MOVED as error:
                watching = False
                adapter.interface_moved(error)
        return output

    setattr(schedule, _MARK, True)
    Scheduler.schedule = schedule


def lengths_of(output: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return new tokens, and all tokens, of each request that a ``SchedulerOutput`` runs."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    new = output.num_scheduled_tokens
    return [*new.values()], [computed[request] + tokens for request, tokens in new.items()]
