"""Watching vLLM's steps where they are scheduled, on the host of the engine's core: whatever backend runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from attn_select.engines.wrap import wrap


def watch(count: Callable[[Any], None]) -> None:
    """Count every step that vLLM schedules in this process; nothing happens the second time."""

    def schedule(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        output = original(*arguments, **options)
        count(output)
        return output

    wrap(Scheduler, "schedule", schedule)


def lengths_of(output: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return new tokens, and all tokens, of each request that a ``SchedulerOutput`` runs."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    new = output.num_scheduled_tokens
    return [*new.values()], [computed[request] + tokens for request, tokens in new.items()]
