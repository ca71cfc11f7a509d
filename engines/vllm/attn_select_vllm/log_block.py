"""The lines logged at the start for each kind of layers: the winner, why, the rejected backends and the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from attn_select import __version__
from attn_select.decide.lines import plain
from attn_select.decide.selection import Selection
from attn_select.decide.text import layer_lines, warning_lines
from attn_select_vllm.choice import Choice, Refusals, served_phases
from attn_select_vllm.names import OWN_PREFIX, PAIRS, engine_backends

_NOTHING = "nothing that vLLM accepts; vLLM chooses by itself"


def choice_text(choice: Choice, kind: str) -> str:
    """Return the block of one kind of layers."""
    lines = [f"attn-select {__version__} chose for {kind}: {_winner(choice)}"]
    lines += _refused(choice.refused)
    selection = choice.selection
    phases = served_phases(selection.config)
    wanted = tuple(dict.fromkeys(selection.selected[phase] for phase in phases))
    if choice.engine is not None and len(wanted) > 1:
        lines.append(f"  it runs in {' and '.join(phases)}: the order in decode counts")
        lines += [
            f"  --attention-backend {OWN_PREFIX}{name} runs prefills by {pair[0]}; it was never run on a GPU"
            for name, pair in PAIRS.items()
            if pair == wanted
        ]
    if not lines[1:] and choice.engine is None:
        lines += _to_install(selection)
    runs = choice.engine is not None and choice.engine.own and choice.backend in selection.selected.values()
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


def prefill_text(chosen: str | None, refused: Mapping[str, Refusals]) -> str:
    """Return the lines about MLA prefill."""
    what = f"{chosen} (vLLM's kernel)" if chosen else _NOTHING
    return "\n".join([f"attn-select {__version__} chose for mla prefill: {what}", *_refused(refused)])


def _to_install(selection: Selection) -> Iterator[str]:
    """Yield the line about the first backend whose plugin is missing, and that vLLM would run."""
    for candidate in selection.candidates:
        reasons = [reason for verdict in candidate.phases.values() for reason in verdict.reasons]
        missing = {reason.remedy for reason in reasons if reason.code == "plugin-not-installed"}
        if missing and engine_backends(candidate.backend, selection.config, selection.device):
            yield f"  {candidate.backend} would run: {' && '.join(filter(None, missing))}"
            return


def _winner(choice: Choice) -> str:
    if choice.engine is None:
        return _NOTHING
    whose = f"attn-select's kernel, as {choice.engine.name}" if choice.engine.own else "vLLM's kernel"
    return f"{choice.backend} ({whose})"


def _refused(refused: Mapping[str, Refusals]) -> Iterator[str]:
    for name, reasons in refused.items():
        yield f"  {name} is not taken: {'; '.join(reasons)}"
