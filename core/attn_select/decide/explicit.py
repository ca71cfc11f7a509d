"""The explicit choice: backends that are asked for by name, for all phases or for one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from attn_select.backends.distributions import registered_name
from attn_select.backends.registry import Plugin
from attn_select.backends.spec import BackendSpec
from attn_select.errors import ConfigError, UnknownNameError, shorten, show
from attn_select.layer.config import PHASES, Phase


@dataclass(frozen=True, slots=True)
class Choice:
    """An explicit choice of backends.

    ``default`` applies to the phases that the backend serves, the others to one phase.
    """

    default: str | None = None
    prefill: str | None = None
    decode: str | None = None

    def for_phase(self, phase: Phase) -> str | None:
        """Return the backend named for exactly this phase, or None."""
        return self.prefill if phase == "prefill" else self.decode

    def among(self, names: Collection[str]) -> Choice:
        """Return the choice of backends with these names alone."""
        kept = [name if name in names else None for name in (self.default, self.prefill, self.decode)]
        return Choice(*kept)

    def for_layer(self, phases: Sequence[Phase], specs: Mapping[str, BackendSpec]) -> dict[Phase, str]:
        """Return the backend that is asked for in each phase of a layer; phases without one are left out."""
        spec = specs.get(self.default or "")
        able = [phase for phase in phases if spec is not None and phase in spec.capabilities] or phases
        found = {phase: self.for_phase(phase) or (self.default if phase in able else None) for phase in phases}
        return {phase: name for phase, name in found.items() if name is not None}


NO_CHOICE = Choice()


def parse_choice(
    backend: str | Sequence[str] | Mapping[str, str] | None, known: Sequence[str], failed: Sequence[Plugin] = ()
) -> Choice:
    """Read ``NAME``, ``PHASE=NAME``, a list of them or a mapping."""
    if backend is None:
        return NO_CHOICE
    if isinstance(backend, Mapping):
        items: list[tuple[str, str]] = list(backend.items())
    else:
        texts = [backend] if isinstance(backend, str) or not isinstance(backend, Sequence) else backend
        items = [_split(text) for text in texts]
    chosen: dict[str, str] = {}
    for written, name in items:
        if not isinstance(written, str) or not isinstance(name, str):
            raise ConfigError(f"backend = {show(backend)}: expected NAME or PHASE=NAME", fields=["backend"])
        phase = written.strip().lower()
        if phase and phase not in PHASES:
            raise UnknownNameError(
                "phase", written, PHASES, hint=f"write NAME or PHASE=NAME with PHASE {' or '.join(PHASES)}"
            )
        spelled = registered_name(name)
        if spelled not in known:
            broken = "; ".join(f"{plugin} is broken: {plugin.error}" for plugin in failed)
            note = f"it may be a backend of a plugin that did not load: {broken}" if failed else None
            raise UnknownNameError("backend", name, known, note=note)
        if chosen.get(phase, spelled) != spelled:
            where = phase or "all phases"
            raise ConfigError(
                f"backend for {where} is given twice: {chosen[phase]} and {shorten(spelled)}", fields=["backend"]
            )
        chosen[phase] = spelled
    return Choice(chosen.get(""), chosen.get("prefill"), chosen.get("decode"))


def _split(text: object) -> tuple[str, str]:
    """Split ``NAME`` or ``PHASE=NAME``; no phase is the empty string."""
    if not isinstance(text, str) or text.startswith("=") or text.endswith("="):
        raise ConfigError(f"backend = {show(text)}: expected NAME or PHASE=NAME", fields=["backend"])
    phase, equals, name = text.partition("=")
    return (phase, name) if equals else ("", text)
