"""The choice for one kind of layers: attn-select's order, of which the first that vLLM accepts is taken.

Imports nothing of vLLM, so that a choice can be tried without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_select.decide.selection import Selection
from attn_select.engines.own_choice import why_own_stays
from attn_select.errors import RuntimeMissingError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select_vllm.names import PAIRS, TABLE, EngineBackend, attn_select_name, engine_backends, kernels_of

Refusals = list[str]
"""Why vLLM does not take a backend, or is not to take it; empty where it does."""
_NO_ROW = "vLLM has no backend that stands for it on this device"
_OWN = "vLLM's own choice is {}: {}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one kind of layers."""

    selection: Selection
    # attn-select's name of the backend that runs, and the same as vLLM knows it; None where vLLM accepts none.
    backend: str | None
    engine: EngineBackend | None
    # What was passed over before it, with the reasons: by vLLM's name, or attn-select's where vLLM has none for it.
    refused: Mapping[str, Refusals]


def served_phases(config: AttentionConfig) -> tuple[Phase, ...]:
    """Return the phases that one backend of vLLM serves: all, but of MLA decode alone, with prefill apart."""
    return ("decode",) if config.mla and not config.sparse else config.phases


def choose(
    selection: Selection, refusals: Callable[[str, EngineBackend], Refusals], own: EngineBackend | None = None
) -> Choice:
    """Return the first backend of attn-select's order that vLLM accepts; ``refusals`` asks it about one."""
    # own: vLLM's own choice, which stays unless times or a user speak for another one; None: it has none.
    config, device = selection.config, selection.device
    phases = served_phases(config)
    refused: dict[str, Refusals] = {}
    for backend in _order(selection, phases):
        kernels = kernels_of(backend)
        backends = {phase: kernels[0 if phase == "prefill" else -1] for phase in phases}
        engines = engine_backends(backend, config, device)
        if not engines:
            refused[backend] = [_NO_ROW]
        for engine in engines:
            reasons = refusals(backend, engine)
            if not reasons and own is not None and engine != own:
                measured = engine.own or not TABLE.has_own_kernel(backend)
                stays = why_own_stays(selection, backends, attn_select_name(own, config, device), measured)
                reasons = [_OWN.format(own.name, stays)] if stays else []
            if not reasons:
                return Choice(selection, backend, engine, refused)
            refused[engine.name] = reasons
    return Choice(selection, None, None, refused)


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


def prefill_order(selection: Selection) -> list[tuple[str, str]]:
    """Return the backends of MLA prefill in attn-select's order, each with vLLM's name of it, where it has one."""
    ranked = [candidate.backend for candidate in selection.ranked(("prefill",))]
    return [(backend, names[0]) for backend in ranked if (names := TABLE.names_of(backend, "mla_prefill"))]


def why_own_prefill_stays(selection: Selection, backend: str, own: str) -> str:
    """Say why vLLM's own choice of MLA prefill, by vLLM's name, stays in place of a backend of attn-select's order."""
    known = next((name for name, engine in prefill_order(selection) if engine == own), None)
    stays = why_own_stays(selection, {"prefill": backend}, known)
    return stays and _OWN.format(own, stays)
