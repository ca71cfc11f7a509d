"""The choice for one kind of layers: attn-select's order, of which the first that vLLM accepts is taken.

Imports nothing of vLLM, so that a choice can be tried without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_select.decide.selection import Selection
from attn_select.engines.own_choice import OwnStays, why_own_stays
from attn_select.errors import RuntimeMissingError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select_vllm.names import PAIRS, EngineBackend, attn_select_name, engine_backends, is_measured, kernels_of

Refusals = list[str]
"""Why vLLM does not take a backend; empty where it does."""
_NO_ROW = "vLLM has no backend that stands for it on this device"


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs a kind of layers: the name in attn-select and vLLM's backend; both None where vLLM is to choose."""

    selection: Selection
    backend: str | None
    engine: EngineBackend | None
    refused: Mapping[str, Refusals]  # what vLLM did not accept before it, by vLLM's name where it has one
    own: EngineBackend | None = None  # what vLLM chooses by itself; None where it has nothing for such layers
    stays: Mapping[str, OwnStays] = field(default_factory=dict)  # by vLLM's name, in whose place that stays

    @property
    def leaves(self) -> bool:
        """Whether vLLM's own choice runs in the place of another backend that vLLM accepts."""
        return bool(self.stays) and self.engine in (None, self.own)


def served_phases(config: AttentionConfig) -> tuple[Phase, ...]:
    """Return the phases that the choice is for: vLLM gives dense MLA's prefill a backend of its own."""
    return ("decode",) if config.mla and not config.sparse else config.phases


def choose(
    selection: Selection,
    refusals: Callable[[str, EngineBackend], Refusals],
    own: EngineBackend | None = None,
    argument: str = "attention",
) -> Choice:
    """Return the first backend of attn-select's order that vLLM accepts, unless its own choice stays."""
    # ``refusals`` asks vLLM about a backend, by attn-select's name and vLLM's. ``own`` is what vLLM chooses by itself,
    # None where it has nothing. ``argument``: which choice of vLLM's it is, or ``mla_prefill`` of dense MLA's prefills.
    config, device = selection.config, selection.device
    phases: tuple[Phase, ...] = ("prefill",) if argument == "mla_prefill" else served_phases(config)
    known = None if own is None else attn_select_name(own, argument)
    refused: dict[str, Refusals] = {}
    stays: dict[str, OwnStays] = {}
    for backend in _order(selection, phases):
        kernels = kernels_of(backend)
        backends = {phase: kernels[0 if phase == "prefill" else -1] for phase in phases}
        engines = engine_backends(backend, config, device, argument)
        if not engines:
            refused[backend] = [_NO_ROW]
        for engine in engines:
            why = None
            if own is not None and engine != own:
                measured = is_measured(backend, engine) and is_measured(known, own)
                why = why_own_stays(selection, backends, known, measured)
            if reasons := refusals(backend, engine):
                refused[engine.name] = reasons
            elif why is not None:
                stays[engine.name] = why
            else:
                return Choice(selection, backend, engine, refused, own, stays)
    return Choice(selection, None, None, refused, own, stays)


def _order(selection: Selection, phases: tuple[Phase, ...]) -> list[str]:
    """Return attn-select's order: before all others the pair of backends that it chose, where vLLM can have it."""
    chosen = tuple(selection.selected[phase] for phase in phases)
    return [*[name for name, pair in PAIRS.items() if pair == chosen], *[c.backend for c in selection.ranked(phases)]]


def refusals_of(name: str, members: Any, ask: Callable[[Any], Iterable[str]]) -> Refusals:
    """Return what the class of one of vLLM's backends says when it is asked; ``members`` is the enum that has it."""
    if name not in members.__members__:
        return ["this release of vLLM does not have it"]
    try:
        return list(ask(members[name].get_class()))
    except (ImportError, OSError, RuntimeMissingError) as error:
        return [f"{type(error).__name__}: {error}"]


def own_choice(members: Any, default: Callable[[], str]) -> EngineBackend | None:
    """Return what vLLM chooses by itself, of the enum ``members``; None where it has nothing for such layers.

    ``default`` returns the class path of vLLM's choice.
    """
    try:
        path = default()
    except (ValueError, RuntimeError):  # a platform says NotImplementedError of what it lacks
        return None
    return EngineBackend(next((name for name, each in members.__members__.items() if each.value == path), path), False)
