"""The choice for one kind of layers: attn-select's order, of which the first that vLLM accepts is taken.

Imports nothing of vLLM, so that a choice can be tried without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_select.decide.selection import Selection
from attn_select.engines.own_kernels import rests_on_our_times
from attn_select.errors import RuntimeMissingError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select_vllm.names import TABLE, EngineBackend, engine_backends

Refusals = list[str]
"""Why vLLM does not take a backend, or is not to take it; empty where it does."""
_NO_ROW = "vLLM has no backend that stands for it on this device"
_BY_OUR_TIMES = "it comes first by times of attn-select's kernel alone, and is vLLM's own"


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


def choose(selection: Selection, refusals: Callable[[str, EngineBackend], Refusals]) -> Choice:
    """Return the first backend of attn-select's order that vLLM accepts; ``refusals`` asks it about one."""
    # A kernel of vLLM's own is passed over where only times of attn-select's put it before another that vLLM accepts.
    config, device = selection.config, selection.device
    phases = served_phases(config)
    refused: dict[str, Refusals] = {}
    order = selection.ranked(phases)
    for place, candidate in enumerate(order):
        backend = candidate.backend
        engines = engine_backends(backend, config, device)
        if not engines:
            refused[backend] = [_NO_ROW]
        for engine in engines:
            reasons = refusals(backend, engine)
            if not reasons and TABLE.has_own_kernel(backend) and not engine.own:
                later = [other.backend for other in order[place + 1 :]]
                better = [name for name in later if rests_on_our_times(selection, backend, phases[-1], name)]
                if any(not refusals(name, each) for name in better for each in engine_backends(name, config, device)):
                    reasons = [_BY_OUR_TIMES]
            if not reasons:
                return Choice(selection, backend, engine, refused)
            refused[engine.name] = reasons
    return Choice(selection, None, None, refused)


def refusals_of(name: str, members: Any, ask: Callable[[Any], Iterable[str]]) -> Refusals:
    """Return what the class of one of vLLM's backends says when it is asked; ``members`` is the enum that has it."""
    if name not in members.__members__:
        return ["this release of vLLM does not have it"]
    try:
        return list(ask(members[name].get_class()))
    except (ImportError, OSError, RuntimeMissingError) as error:
        return [f"{type(error).__name__}: {error}"]


def prefill_order(selection: Selection) -> list[str]:
    """Return vLLM's names of the backends of MLA prefill in attn-select's order."""
    names = [TABLE.names_of(candidate.backend, "mla_prefill") for candidate in selection.ranked(("prefill",))]
    return [each[0] for each in names if each]
