"""The steps that an engine runs, watched while it serves, as a workload: with ``ATTN_SELECT_WORKLOAD=observe``.

What is kept of a step are the lengths of its requests, never their contents. Of each kind of steps (decodes, prefills,
mixed) a random sample of ``KEPT`` is held, so the memory is bounded and every step counts alike.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from attn_select.engines.adapter import MOVED, Adapter
from attn_select.engines.own_choice import SERVING
from attn_select.layer.config import AttentionConfig
from attn_select.machine.files import replace_file
from attn_select.machine.variables import WORKLOAD
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.workload import Workload, default_mix

OBSERVE = "observe"
"""The value of ``ATTN_SELECT_WORKLOAD`` with which an engine is watched, and chosen for without a workload."""
KEPT = 100
"""Steps held of each kind."""
SHORT = 16
"""New tokens up to which a request counts as a decode here: its last token and drafts."""
WRITE_EVERY_S = 60.0
"""Between two writings, after a minute; before, as long as the steps are watched already."""
_PER_OCTAVE = 4
"""Groups into which requests between two powers of two are put."""

Lengths = tuple[Sequence[int], Sequence[int]]
"""New tokens, and all tokens, of each request."""


def workload_in_an_engine(config: AttentionConfig) -> Workload | str:
    """Return the workload that an engine's layers are chosen for: where none is named, or where it is observed,
    ``SERVING`` with their drafts."""
    given = os.environ.get(WORKLOAD)
    return given if given and given != OBSERVE else default_mix(config, SERVING)


def observes() -> bool:
    """Whether the steps of an engine in this process are to be watched."""
    return os.environ.get(WORKLOAD) == OBSERVE


class ObservedSteps:
    """Counts the steps of one engine and writes them as a workload file, from the first step on.

    The file is written at the first step, then at growing intervals up to a minute, and when the process ends; whole
    each time. Engines kill their processes: then the last minute is lost. May be made before a fork; each process that
    counts has a file of its own.
    """

    def __init__(self, engine: str, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.engine, self._say, self._clock = engine, say, clock
        self.file: Path | None = None
        self._counts = dict.fromkeys(("decode", "prefill", "mixed"), 0)
        self._kept: dict[str, list[Lengths]] = {kind: [] for kind in self._counts}
        self._draw = random.Random(0)
        self._began = self._next = 0.0

    def count(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Take note of a step; costs microseconds, and now and then the time to write the file."""
        if not query_lens:
            return
        if self.file is None:
            self._begin()
        kind = "mixed" if min(query_lens) <= SHORT < max(query_lens) else "decode"
        if min(query_lens) > SHORT:
            kind = "prefill"
        kept = self._kept[kind]
        self._counts[kind] += 1
        # Algorithm R: each of n steps is held with probability KEPT / n.
        place = len(kept) if len(kept) < KEPT else self._draw.randrange(self._counts[kind])
        if place < KEPT:
            kept[place : place + 1] = [(tuple(query_lens), tuple(seq_lens))]
        now = self._clock()
        if now >= self._next:
            self._next = now + min(WRITE_EVERY_S, max(1.0, now - self._began))
            self.write()

    def _begin(self) -> None:
        from multiprocessing.util import Finalize

        import platformdirs

        folder = platformdirs.user_cache_path("attn-select", appauthor=False) / "workloads"
        engine = self.engine.partition(" ")[0].lower()
        self.file = folder / f"{engine}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.toml"
        self._began = self._next = self._clock()
        Finalize(None, self.write, exitpriority=10)  # also where a forked process ends, which runs no atexit
        self._say(
            f"the observed workload is written to {self.file} once a minute. "
            f"{WORKLOAD}={self.file} chooses for it, `attn-select tune --workload {self.file}` measures it"
        )

    def to_toml(self) -> str:
        """Return the file's text: every held step, weighted by the steps of its kind that it stands for."""
        counted = ", ".join(f"{count} {kind}" for kind, count in self._counts.items() if count)
        lines = [f"# Steps of {self.engine}, observed until {datetime.now():%Y-%m-%d %H:%M}: {counted}."]
        lines += [f"# Of each kind at most {KEPT} are held, drawn at random.", 'name = "observed"']
        for kind, kept in self._kept.items():
            for lengths in kept:
                weight = self._counts[kind] / len(kept)
                lines += ["", "[[shapes]]", f'batch = "{shape_of(*lengths)}"', f"weight = {weight:.6g}"]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Write the file, where a step was counted. What hinders it is said, never raised: the engine goes on."""
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.file, self.to_toml().encode())
        except OSError as error:
            self._say(f"the observed workload cannot be written to {self.file}: {error.strerror or error}")


def counter(adapter: Adapter, lengths_of: Callable[..., Lengths], say: Callable[[str], None]) -> Callable[..., None]:
    """Return what counts an engine's step, given what ``lengths_of`` reads its lengths from, until that has moved."""
    steps: ObservedSteps | None = ObservedSteps(f"{adapter.engine} {adapter.version}", say)

    def count(*step: Any) -> None:
        nonlocal steps
        if steps is not None:
            try:
                steps.count(*lengths_of(*step))
            except MOVED as error:
                steps = None
                adapter.interface_moved(error)

    return count


def shape_of(query_lens: Sequence[int], seq_lens: Sequence[int]) -> BatchShape:
    """Return a step's batch, with requests of nearly equal lengths as one group of their mean.

    New tokens up to ``SHORT`` are kept as they are. The step's number of tokens stays, up to the rounding of each mean.
    """
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        groups.setdefault((_class(query_len, SHORT), _class(seq_len, 0)), []).append((query_len, seq_len))
    made = []
    for requests in groups.values():
        new, whole = (round(math.fsum(lengths) / len(requests)) for lengths in zip(*requests, strict=True))
        made.append(RequestGroup(len(requests), new, max(new, whole)))
    return BatchShape(tuple(made))


def _class(tokens: int, exact: int) -> int:
    """Return the class of a length: itself up to ``exact``, else its quarter of an octave."""
    return tokens if tokens <= exact else exact + 1 + int(_PER_OCTAVE * math.log2(tokens))
