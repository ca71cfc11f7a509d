"""The choice for one kind of layers: attn-select's order, of which the first that vLLM accepts is taken.

Imports nothing of vLLM, so that a choice can be tried without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from attn_select.config import AttentionConfig, Phase
from attn_select.selection import Selection
from attn_select_vllm.names import PREFILL_NAMES, EngineBackend, engine_backends

Refusals = list[str]
"""Why vLLM does not take a backend; empty where it does."""
UNKNOWN = "this release of vLLM does not have it"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one kind of layers.

    Attributes:
        selection: attn-select's decision.
        backend: attn-select's name of the backend that runs; None where vLLM accepts none.
        engine: the same as vLLM knows it; None with ``backend``.
        refused: what was tried before it, by vLLM's name, with vLLM's reasons.
    """

    selection: Selection
    backend: str | None
    engine: EngineBackend | None
    refused: Mapping[str, Refusals]


def served_phases(config: AttentionConfig) -> tuple[Phase, ...]:
    """Return the phases that one backend of vLLM serves: all, but of MLA decode alone, with prefill apart."""
    return ("decode",) if config.mla and not config.sparse else config.phases


def choose(selection: Selection, refusals: Callable[[str, EngineBackend], Refusals]) -> Choice:
    """Return the first backend of attn-select's order that vLLM accepts.

    Args:
        refusals: asks vLLM about one of its backends; gets attn-select's name of it too.
    """
    config = selection.config
    refused: dict[str, Refusals] = {}
    for candidate in selection.ranked(served_phases(config)):
        for engine in engine_backends(candidate.backend, config, selection.device):
            reasons = refusals(candidate.backend, engine)
            if not reasons:
                return Choice(selection, candidate.backend, engine, refused)
            refused[engine.name] = reasons
    return Choice(selection, None, None, refused)


def prefill_order(selection: Selection) -> list[str]:
    """Return vLLM's names of the backends of MLA prefill in attn-select's order."""
    return [PREFILL_NAMES[c.backend] for c in selection.ranked(("prefill",)) if c.backend in PREFILL_NAMES]
