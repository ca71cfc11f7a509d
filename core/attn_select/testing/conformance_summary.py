"""Counts what happened to the configurations of conformance suites, over all processes of pytest-xdist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypedDict

import pytest


class SuiteCounts(TypedDict):
    """What happened to a suite's configurations in one process, as plain data that pytest-xdist can send."""

    suite: str
    seed: int
    tally: dict[str, int]
    not_run: dict[str, int]


def summary_lines(counts: Iterable[SuiteCounts]) -> list[str]:
    """Return the lines that count outcomes. One suite in several processes is one line."""
    tallies: dict[tuple[str, int], tuple[Counter[str], Counter[str]]] = {}
    for each in counts:
        tally, not_run = tallies.setdefault((each["suite"], each["seed"]), (Counter(), Counter()))
        tally.update(each["tally"])
        not_run.update(each["not_run"])
    lines = []
    for (suite, seed), (tally, not_run) in tallies.items():
        if drawn := tally["accepted"] + tally["rejected"]:
            runs = f"{tally['run']} run ({tally['batches']} batches, {tally['replays']} graph replays)"
            judged = f"{tally['accepted']} accepted, {tally['rejected']} rejected"
            ended = f"{tally['failed']} failed, {not_run.total()} not run"
            lines.append(f"{suite}: {drawn} configurations of seed {seed}: {judged}, {runs}, {ended}")
            lines += [f"  {count} not run: {why}" for why, count in not_run.most_common()]
    return lines


class SummaryPlugin:
    """Prints every suite's counts at the end of the session."""

    name = "attn-select-conformance"

    def __init__(self) -> None:
        self.suites: dict[Any, None] = {}  # classes with ``counts``

    def counts(self) -> list[SuiteCounts]:
        return [suite.counts() for suite in self.suites]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a worker of pytest-xdist, send the counts to the process that prints them."""
        output: dict[str, list[SuiteCounts]] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[self.name] = self.counts()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write_summary(terminalreporter, self.counts())


def write_summary(terminalreporter: pytest.TerminalReporter, counts: Iterable[SuiteCounts]) -> None:
    """Write the counts of all suites at the end of a session, nothing where no suite ran."""
    if lines := summary_lines(counts):
        terminalreporter.section("attention backends held to their specs")
        for line in lines:
            terminalreporter.write_line(line)
