"""The choice for a model: of attn-select's order the first that SGLang has for all kinds of layers.

Imports nothing of SGLang, so that a choice can be tried without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attn_select.decide.selection import Selection
from attn_select.engines.own_kernels import rests_on_our_times
from attn_select.layer.config import Phase
from attn_select_sglang.names import OWN_KERNELS, engine_name


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a model, in SGLang's names; None where SGLang has none of the order for a phase.

    Attributes:
        prefill, decode: the backend of each phase.
        passed_over: attn-select's backends that come before, which SGLang does not have for these layers.
        not_ours: attn-select's backends that come before, of whose names SGLang runs kernels of its own: only times of
            attn-select's kernels put them there.
    """

    prefill: str | None
    decode: str | None
    passed_over: tuple[str, ...]
    not_ours: tuple[str, ...] = ()

    def declared(self) -> dict[str, str]:
        """Return the fields of ``ServerArgs`` that say it; nothing where a phase has none."""
        if self.prefill is None or self.decode is None:
            return {}
        fields = {"attention_backend": self.decode}
        if self.prefill != self.decode:
            fields |= {"prefill_attention_backend": self.prefill, "decode_attention_backend": self.decode}
        return fields


@dataclass(frozen=True, slots=True)
class _Ranked:
    """One of attn-select's backends in its order.

    Attributes:
        name: SGLang's; None where it has none.
        place: in the order for SGLang, least first.
        ours: whether it stands where it does by times of attn-select's kernel alone, which ``place`` leaves out.
    """

    backend: str
    name: str | None
    place: float
    ours: bool


def choose(selections: Sequence[Selection], has_flashinfer: bool) -> Choice:
    """Return the backends that stand least far behind in the orders of all kinds of layers together.

    One backend serves both phases, unless attn-select chose a pair for a kind.
    """
    pair = any(len(set(selection.selected.values())) > 1 for selection in selections)
    phases: list[tuple[Phase, ...]] = [("prefill",), ("decode",)] if pair else [("prefill", "decode")]
    names: list[str | None] = []
    before: list[_Ranked] = []
    for served in phases:
        name, others = _first(selections, served, has_flashinfer)
        names.append(name)
        before += others
    passed_over = dict.fromkeys(each.backend for each in before if not each.ours)
    not_ours = dict.fromkeys(each.backend for each in before if each.ours)
    return Choice(names[0], names[-1], tuple(passed_over), tuple(not_ours))


def _first(
    selections: Sequence[Selection], phases: tuple[Phase, ...], has_flashinfer: bool
) -> tuple[str | None, list[_Ranked]]:
    """Return SGLang's backend for these phases, and attn-select's that come before it."""
    orders = [
        _order(selection, served, has_flashinfer)
        for selection in selections
        if (served := [phase for phase in phases if phase in selection.config.phases])
    ]
    named = [{e.name: e for e in sorted(order, key=lambda e: e.place, reverse=True) if e.name} for order in orders]
    common = [name for name in named[0] if all(name in each for each in named)] if named else []
    if not common:
        return None, [each for order in orders for each in order]
    best = min(common, key=lambda name: sum(each[name].place for each in named))
    return best, [e for order, each in zip(orders, named, strict=True) for e in order[: order.index(each[best])]]


def _order(selection: Selection, phases: Sequence[Phase], has_flashinfer: bool) -> list[_Ranked]:
    """Return attn-select's order for these phases of a kind of layers, as SGLang has it."""
    order: list[_Ranked] = []
    for place, candidate in enumerate(selection.ranked(phases)):
        plans = [plan for phase in phases if (plan := candidate.phases[phase].plan) is not None]
        kernels = [plan.kernel_name for plan in plans]
        name = engine_name(candidate.backend, selection.config, selection.device, kernels, has_flashinfer)
        order.append(_Ranked(candidate.backend, name, place, False))
    for place, each in enumerate(order):
        before = [
            later.place
            for later in order[place + 1 :]
            if later.name and rests_on_our_times(selection, each.backend, phases[-1], later.backend)
        ]
        if each.name in OWN_KERNELS and before:
            order[place] = replace(each, place=before[-1] + 0.5, ours=True)
    return order
