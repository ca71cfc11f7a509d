"""Ranks compare what they are about to do, and each of them raises the same error where it differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError, shorten
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.context_parallel.collectives import Collectives, RankError
from attn_select.runtime.context_parallel.context_parallel import ContextParallel
from attn_select.runtime.metadata import CommonAttentionMetadata


def do_alike(collectives: Collectives, what: str, do: Callable[[], Mapping[str, str]]) -> None:
    """Do what every rank does, and compare the facts of it, which it returns, with the others'. Synchronises."""
    # Raises what ``do`` raised here, and tells the other ranks; RankError where another rank failed, or a fact
    # differs.
    problem: Exception | None = None
    facts: Mapping[str, str] = {}
    try:
        facts = do()
    except Exception as error:
        problem = error
    # Every rank gathers whatever happened: one that left early would let the others wait for ever.
    told = None if problem is None else f"{type(problem).__name__}: {problem}"
    try:
        found = collectives.gather_objects((told, dict(facts)))
    finally:
        if problem is not None:
            raise problem
    if problems := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text is not None]:
        raise RankError(f"{what}: {'; '.join(problems)}")
    for name in facts:
        values = [other.get(name) for _, other in found]
        if any(value != values[0] for value in values):
            each = ", ".join(f"rank {rank}: {shorten(value, 300)}" for rank, value in enumerate(values))
            raise RankError(
                f"{what}: the ranks of the group have different {name} ({each})",
                hint="select once and send the selection to all ranks (it can be pickled), and give all the same batch",
            )


def check_selection(selection: Selection, context_parallel: ContextParallel) -> None:
    """Raise ConfigError for a selection that these ranks cannot run, or cannot merge batch-invariantly."""
    ranks = selection.config.decode_context_parallel_size
    if ranks != context_parallel.size:
        raise ConfigError(
            f"decode_context_parallel_size = {ranks}, but the process group has {context_parallel.size} ranks",
            fields=["decode_context_parallel_size"],
            hint=f"select with decode_context_parallel_size = {context_parallel.size}, or start {ranks} ranks",
        )
    if selection.config.batch_invariant and context_parallel.merge == "symm":
        text = "merge = 'symm' with batch_invariant = True: how results are summed depends on the batch"
        raise ConfigError(f"{text} (accepted: auto, a2a)", fields=["merge", "batch_invariant"])


def facts_of(selection: Selection, context_parallel: ContextParallel, capacity: Capacity) -> dict[str, str]:
    """Return what all ranks of a group must have in common."""
    return {
        "selections": str({p: f"{n}, {selection.plans[p].kernel}" for p, n in selection.selected.items() if n}),
        "configs": str(selection.config.model_dump(exclude_defaults=True)),
        "caches": f"{selection.kv_layout}, blocks of {selection.block_size}",
        "interleaves": str(context_parallel.interleave),
        "ways to merge": context_parallel.merge,
        "queries": context_parallel.queries,
        "capacities": str(capacity),
    }


def batch_facts(common: CommonAttentionMetadata, block_size: int) -> dict[str, str]:
    """Return what all ranks must have in common in a step (checked mode), by the scheduler's tables. Synchronises."""
    facts = {"query_lens": str(common.query_lens_cpu.tolist()), "seq_lens": str(common.seq_lens_cpu.tolist())}
    if common.block_table_tensor is not None:
        rows = common.block_table_tensor.cpu()
        used = [row[: -(-length // block_size)] for row, length in zip(rows, common.seq_lens_cpu.tolist(), strict=True)]
        facts["block tables"] = str([row.tolist() for row in used])
    if common.slot_mapping is not None:
        facts["slots"] = str(common.slot_mapping.tolist())
    return facts
