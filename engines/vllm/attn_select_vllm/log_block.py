"""The lines logged at the start for each kind of layers: the winner, why, the rejected backends and the rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attn_select import __version__
from attn_select.decide.lines import plain
from attn_select.decide.selection import Selection
from attn_select.decide.text import layer_lines, warning_lines
from attn_select_vllm.choice import Choice, served_phases
from attn_select_vllm.names import OWN_PREFIX, PAIRS, engine_backends, kernels_of


def choice_text(choice: Choice, kind: str) -> str:
    """Return the block of one kind of layers."""
    lines = _lines(choice, kind)
    selection = choice.selection
    phases = served_phases(selection.config)
    runs_pair = choice.backend in PAIRS
    runs_one_of_two = not runs_pair and len({selection.selected[phase] for phase in phases}) > 1
    if runs_one_of_two and choice.engine is not None and not choice.leaves:
        lines.append(f"  it runs in {' and '.join(phases)}: the order in decode counts")
    if not lines[1:] and not choice.leaves and choice.engine is None:
        lines += _to_install(selection)
    chosen = runs_pair or choice.backend in selection.selected.values()
    runs = choice.engine is not None and choice.engine.own and chosen
    shown = replace(selection, kv_layout=None)  # the cache is laid out by vLLM, otherwise
    lines.append(plain([*layer_lines(shown, kind, runs=runs, remedies=False), *warning_lines(selection.warnings)]))
    return "\n".join(lines)


def explicit_text(name: str, kind: str) -> str:
    """Return the line for layers whose backend was named: by an argument, ``attention_config``, or vLLM for a model."""
    pair = PAIRS.get(name.removeprefix(OWN_PREFIX))
    what = f" (prefills by {pair[0]}, decodes by {pair[1]})" if pair else ""
    asks = "--attention-backend, attention_config or the model asks for it"
    return f"attn-select {__version__} leaves {kind} to {name}{what}: {asks}"


def abstained_text(reason: str, kind: str) -> str:
    """Return the line for layers that attn-select cannot judge."""
    return f"attn-select {__version__} leaves {kind} to vLLM: {reason}"


def prefill_text(choice: Choice) -> str:
    """Return the lines about MLA prefill."""
    return "\n".join(_lines(choice, "mla prefill"))


def _to_install(selection: Selection) -> Iterator[str]:
    """Yield the line about the first backend whose plugin is missing, and that vLLM would run."""
    for candidate in selection.candidates:
        reasons = [reason for verdict in candidate.phases.values() for reason in verdict.reasons]
        missing = {reason.remedy for reason in reasons if reason.code == "plugin-not-installed"}
        if missing and engine_backends(candidate.backend, selection.config, selection.device):
            yield f"  {candidate.backend} would run: {' && '.join(filter(None, missing))}"
            return


def _lines(choice: Choice, kind: str) -> list[str]:
    """Return the line of what runs, and those of what does not run in its place."""
    passed = [why.text(name) for name, why in choice.stays.items()]
    if choice.leaves and choice.own is not None:
        lines = [f"attn-select {__version__} leaves {kind} to vLLM's {choice.own.name}: {passed.pop(0)}"]
    else:
        lines = [f"attn-select {__version__} chose for {kind}: {_winner(choice)}"]
    lines += [f"  {name} is not taken: {'; '.join(reasons)}" for name, reasons in choice.refused.items()]
    return [*lines, *[f"  {text}" for text in passed]]


def _winner(choice: Choice) -> str:
    if choice.engine is None:
        return "nothing that vLLM accepts; vLLM chooses by itself"
    if not choice.engine.own:
        return f"{choice.engine.name} (vLLM's kernel)"
    *prefills, decodes = kernels_of(choice.backend or "")
    names = "".join(f"{name} in prefills, " for name in prefills) + decodes
    return f"{names} (attn-select's kernel, as {choice.engine.name})"
