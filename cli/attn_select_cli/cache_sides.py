"""Two sides that exchange a KV cache: in what their caches differ, and which options make them fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_select.decide.outcome import Outcome
from attn_select.errors import AttnSelectError
from attn_select.layer.cache_format import CacheFormat, Format
from attn_select.layer.state_format import StateFormat
from attn_select_cli.explanation import Explanation, build_explanation
from attn_select_cli.layer_options import options_in

SIDES = ("prefill", "decode")
_FLAGS = {
    "dtype": ("--kv-cache-dtype {}", "--dtype {}"),
    "num_kv_heads": ("--tensor-parallel {}",),
    "num_v_heads": ("--tensor-parallel {}",),
    "state_dtype": ("--state-dtype {}",),
    "conv_dtype": ("--dtype {}",),
    "decode_context_parallel_size": ("--dcp {}",),
    "block_size": ("--block-size {}",),
    "kernel_block_size": ("--block-size {}",),
}
"""Fact of a format -> the options that may change it, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which the caches of one kind of layers differ."""

    kind: str
    fact: str  # its name in ``Format.facts``
    prefill: Any
    decode: Any
    side: str | None  # which side ``argument`` is for; None where no option removes the difference
    argument: str | None

    @property
    def converted(self) -> bool:
        """Whether one side's cache can be turned into the other's in this."""
        return self.fact in (*CacheFormat.converted, *StateFormat.converted)


@dataclass(slots=True)
class Comparison:
    """Both sides, and what has to change."""

    sides: tuple[Explanation, Explanation]  # prefill, then decode
    differences: list[Difference]  # kind by kind; empty: both sides exchange blocks as they are
    # per side the options to add, which together leave no difference; empty where there are none
    arguments: dict[str, list[str]] = field(default_factory=dict)


def formats(explanation: Explanation) -> dict[str, Format | None]:
    """Return kind of layers -> the format of its cache; None where it keeps none."""
    return {layer.kind: format_of(layer.selection) for layer in explanation.layers}


def format_of(selection: Outcome[Any]) -> Format | None:
    """Return the format of a layer's blocks or states."""
    return selection.cache_format or selection.state_format


def compare(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> Comparison:
    """Decide for both sides, and look for options of either that make their caches equal.

    An option is named only if a decision with it was made and has the other side's value.
    """
    options = [dict(prefill), dict(decode)]
    before = build_explanation(options[0]), build_explanation(options[1])
    sides = [*before]
    found: dict[str, tuple[str, str]] = {}
    for fact in (*_FLAGS, "scales", "layout", "state_layout"):
        for index in (1, 0):
            if fact not in _differing(*sides):
                break
            for argument in _proposals(fact, sides[index], sides[1 - index], options[1 - index]):
                given = options_in(argument, "--to")[1]
                if "backend" in given:  # one for attention and one for states may be named
                    given["backend"] = (*options[index].get("backend", ()), *given["backend"])
                changed = {**options[index], **given}
                try:
                    tried = build_explanation(changed)
                except AttnSelectError:
                    continue  # the backends of that side do not take this value
                pair = (sides[0], tried) if index else (tried, sides[1])
                if tried.ok and fact not in _differing(*pair):
                    # Others may go with it: without FP8 there are no scales.
                    gone = _differing(*sides) - _differing(*pair)
                    found |= dict.fromkeys(gone, (SIDES[index], argument))
                    options[index], sides[index] = changed, tried
                    break
    differences = [
        Difference(kind, fact, here, there, *found.get(fact, (None, None)))
        for kind, fact, here, there in _differences(*before)
    ]
    arguments: dict[str, list[str]] = {}
    if not _differing(*sides):
        for side, argument in dict.fromkeys(found.values()):
            arguments.setdefault(side, []).append(argument)
    return Comparison(before, differences, arguments)


def _differences(prefill: Explanation, decode: Explanation) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield kind, fact and both values for all in which the two sides differ."""
    there = formats(decode)
    for kind, here in formats(prefill).items():
        other = there.get(kind)
        if here is not None and other is not None:
            for fact, values in here.differences(other).items():
                yield kind, fact, *values


def _differing(prefill: Explanation, decode: Explanation) -> set[str]:
    return {fact for _, fact, _, _ in _differences(prefill, decode)}


def _proposals(fact: str, changed: Explanation, other: Explanation, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options of one side that may give it the other side's value; ``options`` are the other side's."""
    facts = next(form.facts() for form in formats(other).values() if form is not None and fact in form.facts())
    if fact in ("layout", "state_layout"):
        chosen = [name for layer in other.layers for name in layer.selection.selected.values() if name is not None]
        able = [
            name.backend for layer in changed.layers for name in layer.selection.ranked(layer.selection.config.phases)
        ]
        for name in dict.fromkeys((*chosen, *able)):
            yield f"--backend {name}"
    elif fact == "scales":
        yield "--per-head-quant-scales" if facts["scales"] == "per_head" else "--no-per-head-quant-scales"
    else:
        by_ranks = fact in ("num_kv_heads", "num_v_heads")
        value = options["tensor_parallel"] if by_ranks else facts[fact.removeprefix("kernel_")]
        for flag in _FLAGS[fact]:
            yield flag.format(value)
