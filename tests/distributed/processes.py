"""Runs a function on the ranks of a gloo process group, each in a process of its own."""

from __future__ import annotations

import os
import queue
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
"""The group's: it ends what nothing else does, since a busy machine lets a rank wait long for its first step."""

_context = get_context("forkserver")
# Imported once: each process is then a copy that starts at once.
_context.set_forkserver_preload(["torch", "torch.distributed", "attn_select.testing", "attn_select_torch.runtime.sdpa"])


def _rank(rank: int, size: int, file: str, variables: Any, function: Any, arguments: Any, results: Any) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=TIMEOUT)
        results.put((rank, function(rank, *arguments)))
    except Exception as error:
        results.put((rank, error if _travels(error) else RuntimeError(traceback.format_exc())))
    results.close()
    results.join_thread()
    os._exit(0)  # the group of a rank that died cannot be left in order


def _travels(error: Exception) -> bool:
    """Whether an error can be pickled and made again."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def run_processes(
    size: int,
    folder: Path,
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Return what ``function(rank, *arguments)`` returned or raised on each rank; None for one that died.

    Args:
        folder: for the file by which the ranks find each other.
        function: of a module that the processes can import.
        environment: variables of the processes.
    """
    results: Any = _context.Queue()
    file = str(folder / f"ranks {os.urandom(4).hex()}")
    variables = dict(environment or {})
    processes = [
        _context.Process(
            target=_rank,
            args=(rank, size, file, variables, function, arguments, results),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: list[Any] = [None] * size
    waiting = set(range(size))
    while waiting:
        try:
            rank, result = results.get(timeout=0.2)
            found[rank] = result
            waiting.discard(rank)
        except queue.Empty:
            waiting -= {rank for rank in waiting if not processes[rank].is_alive() and results.empty()}
    for process in processes:
        process.join()
    return found
