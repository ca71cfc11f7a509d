"""Ranks compare what they are about to do, and each of them raises the same error where it differs."""

from __future__ import annotations

from collections.abc import Mapping

from attn_select.runtime.context_parallel.collectives import Collectives, RankError


def agree(collectives: Collectives, what: str, facts: Mapping[str, str], problem: str | None = None) -> None:
    """Compare facts with those of all other ranks. Synchronises.

    Args:
        what: what the facts belong to, in an error.
        facts: name and value; every rank has the same names.
        problem: what keeps this rank from going on, so that the others need not wait for it.

    Raises:
        RankError: a rank has a problem, or a fact differs: names the fact, and each rank's value.
    """
    found = collectives.gather_objects((problem, dict(facts)))
    if problems := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text is not None]:
        raise RankError(f"{what}: {'; '.join(problems)}")
    for name in facts:
        values = [other.get(name) for _, other in found]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise RankError(
                f"{what}: the ranks of the group have different {name} ({each})",
                hint="select once and send the selection to all ranks (it can be pickled), and give all the same batch",
            )
