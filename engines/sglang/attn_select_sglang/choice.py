"""The choice for a model: of attn-select's order the first that SGLang has for all kinds of layers.

Imports nothing of SGLang, so that a choice can be tried without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from attn_select.decide.selection import Selection
from attn_select.engines.names import EngineName, Offer
from attn_select.layer.config import Phase
from attn_select_sglang.names import TABLE, lacks


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a model, in SGLang's names; None where SGLang has none of the order for a phase."""

    prefill: str | None
    decode: str | None
    # attn-select's backends that come before, which SGLang does not have for these layers.
    passed_over: tuple[str, ...]
    # attn-select's backends that come before, of whose names SGLang runs kernels of its own: only times of
    # attn-select's kernels put them there.
    not_ours: tuple[str, ...] = ()

    def declared(self) -> dict[str, str]:
        """Return the fields of ``ServerArgs`` that say it; nothing where a phase has none."""
        if self.prefill is None or self.decode is None:
            return {}
        fields = {"attention_backend": self.decode}
        if self.prefill != self.decode:
            fields |= {"prefill_attention_backend": self.prefill, "decode_attention_backend": self.decode}
        return fields


def choose(selections: Sequence[Selection], has_flashinfer: bool, architecture: str) -> Choice:
    """Return the backends that stand least far behind in the orders of all kinds of layers together."""
    # One backend serves both phases, unless attn-select chose a pair for a kind that does not rest on times of its own
    # kernels alone. Some architectures (the model's class; empty: unknown) take certain backends alone.
    without = partial(lacks, has_flashinfer=has_flashinfer)
    pair = any(TABLE.takes_a_pair(selection, without, architecture) for selection in selections)
    phases: list[tuple[Phase, ...]] = [("prefill",), ("decode",)] if pair else [("prefill", "decode")]
    names: list[str | None] = []
    before: list[Offer] = []
    for served in phases:
        name, others = _first(selections, served, without, architecture)
        names.append(name)
        before += others
    passed_over = dict.fromkeys(each.backend for each in before if each.name is None)
    not_ours = dict.fromkeys(each.backend for each in before if each.name is not None)
    return Choice(names[0], names[-1], tuple(passed_over), tuple(not_ours))


def _first(
    selections: Sequence[Selection],
    phases: tuple[Phase, ...],
    without: Callable[[EngineName], str],
    architecture: str,
) -> tuple[str | None, list[Offer]]:
    """Return SGLang's backend for these phases, and attn-select's that come before it."""
    orders = [
        TABLE.offers(selection, served, "attention", without, architecture)
        for selection in selections
        if (served := [phase for phase in phases if phase in selection.config.phases])
    ]
    # Sorted from the last place to the first, so that of a name that stands twice the first place is kept.
    named = [{e.name.name: e for e in sorted(order, key=lambda e: e.place, reverse=True) if e.name} for order in orders]
    common = [name for name in named[0] if all(name in each for each in named)] if named else []
    if not common:
        return None, [each for order in orders for each in order]
    best = min(common, key=lambda name: sum(each[name].place for each in named))
    return best, [e for order, each in zip(orders, named, strict=True) for e in order[: order.index(each[best])]]
