"""The choice for a model: of attn-select's order the first that SGLang has for all kinds of layers.

Imports nothing of SGLang, so that a choice can be tried without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attn_select.config import Phase
from attn_select.selection import Selection
from attn_select_sglang.names import engine_name


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a model, in SGLang's names; None where SGLang has none of the order for a phase.

    Attributes:
        prefill, decode: the backend of each phase.
        passed_over: attn-select's backends that come before, which SGLang does not have for these layers.
    """

    prefill: str | None
    decode: str | None
    passed_over: tuple[str, ...]

    def declared(self) -> dict[str, str]:
        """Return the fields of ``ServerArgs`` that say it; nothing where a phase has none."""
        if self.prefill is None or self.decode is None:
            return {}
        fields = {"attention_backend": self.decode}
        if self.prefill != self.decode:
            fields |= {"prefill_attention_backend": self.prefill, "decode_attention_backend": self.decode}
        return fields


def choose(selections: Sequence[Selection], has_flashinfer: bool) -> Choice:
    """Return the backends that stand least far behind in the orders of all kinds of layers together.

    One backend serves both phases, unless attn-select chose a pair for a kind.
    """
    pair = any(len(set(selection.selected.values())) > 1 for selection in selections)
    if pair:
        prefill, before = _first(selections, ("prefill",), has_flashinfer)
        decode, more = _first(selections, ("decode",), has_flashinfer)
        return Choice(prefill, decode, tuple(dict.fromkeys([*before, *more])))
    both, before = _first(selections, ("prefill", "decode"), has_flashinfer)
    return Choice(both, both, tuple(dict.fromkeys(before)))


def _first(
    selections: Sequence[Selection], phases: tuple[Phase, ...], has_flashinfer: bool
) -> tuple[str | None, list[str]]:
    """Return SGLang's backend for these phases, and attn-select's that come before it."""
    orders: list[list[tuple[str, str | None]]] = []
    for selection in selections:
        served = [phase for phase in phases if phase in selection.config.phases]
        if served:
            orders.append([])
            for candidate in selection.ranked(served):
                plans = [plan for phase in served if (plan := candidate.phases[phase].plan) is not None]
                kernels = [plan.kernel_name for plan in plans]
                name = engine_name(candidate.backend, selection.config, selection.device, kernels, has_flashinfer)
                orders[-1].append((candidate.backend, name))
    places = [{name: place for place, (_, name) in reversed([*enumerate(o)]) if name is not None} for o in orders]
    common = [name for name in places[0] if all(name in each for each in places)] if places else []
    if not common:
        return None, [backend for order in orders for backend, _ in order]
    best = min(common, key=lambda name: sum(each[name] for each in places))
    return best, [b for order, each in zip(orders, places, strict=True) for b, _ in order[: each[best]]]
