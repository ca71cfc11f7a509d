"""The arguments by which an engine takes kernels of layers that keep a state, one phase of one recurrence at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attn_select.decide.selection import Selection
from attn_select.layer.config import Phase
from attn_select.layer.state import StateConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArgument:
    """An argument that names a kernel of states."""

    argument: str  # ``--flag``
    recurrences: tuple[str, ...]
    phases: tuple[str, ...]
    values: Mapping[str, str]  # by attn-select's backend, the engine's value for it
    source: str  # file of the engine, and what to look for in it


@dataclass(frozen=True, slots=True)
class TakenState:
    """What an engine is told for one phase of a layer that keeps a state."""

    phase: Phase
    selected: str | None  # attn-select's backend
    backend: str | None  # the first of attn-select's order that the engine has; None where it has none
    row: StateArgument | None  # None where the engine leaves no choice
    passed_over: Sequence[str] = ()  # backends of the order before it

    @property
    def value(self) -> str | None:
        """The argument's value."""
        return None if self.row is None or self.backend is None else self.row.values[self.backend]


def taken_states(rows: Sequence[StateArgument], selection: Selection[StateConfig]) -> list[TakenState]:
    """Return for each phase of a layer what the engine can be told of attn-select's order."""
    found = []
    for phase in selection.config.phases:
        row = next(
            (each for each in rows if selection.config.recurrence in each.recurrences and phase in each.phases), None
        )
        order = [candidate.backend for candidate in selection.ranked((phase,))]
        backend = None if row is None else next((name for name in order if name in row.values), None)
        before = order[: order.index(backend)] if backend is not None else ()
        found.append(TakenState(phase, selection.selected[phase], backend, row, before))
    return found
