"""What an engine says of one kind of layers, as lines: what it takes by itself, and what its backends accept."""

from __future__ import annotations

from attn_select.decide.lines import Line, row
from attn_select.engines.answers import EngineAnswer, EngineAnswers

_OF_DEVICE = "compute-capability"
_OF_KIND = {"mla-only", "mla-unsupported", "sparse-only", "sparse-unsupported", "model"}


def engine_lines(answers: EngineAnswers, full: bool) -> list[Line]:
    """Return the lines; not ``full``: backends for other GPUs and for other layers are only counted."""
    table = answers.table
    lines = [row(f"{table.engine} {table.release}" if not i else "", each) for i, each in enumerate(_chosen(answers))]
    accepted = [each for each in answers.backends if not each.reasons]
    lines += [row("" if i else "accepts", _accepted(each, table.engine)) for i, each in enumerate(accepted)]
    rejected = {"for other GPUs": 0, "serve other layers": 0}
    told: list[tuple[str, str]] = []
    for each in answers.backends[len(accepted) :]:
        codes = [reason.code for reason in each.reasons]
        if not full and (_OF_DEVICE in codes or not _OF_KIND.isdisjoint(codes)):
            rejected["for other GPUs" if _OF_DEVICE in codes else "serve other layers"] += 1
        else:
            told.append((f"{_name(each)}: {'; '.join(reason.message for reason in each.reasons)}", ""))
    if folded := ", ".join(f"{count} {why}" for why, count in rejected.items() if count):
        told.append((f"{folded} (--full names them)", "dim"))
    return lines + [row("" if i else "rejects", each, style="rejected") for i, each in enumerate(told)]


def _chosen(answers: EngineAnswers) -> list[tuple[str, str]]:
    """Return what the engine takes by itself, as texts with styles."""
    if answers.refused:
        table = answers.table
        return [(answers.refused.removeprefix(f"{table.engine} {table.release}").lstrip(": "), "rejected")]
    if answers.otherwise:
        return [(f"runs them in another way, by its default: {answers.otherwise}", "rejected")]
    if not answers.chosen:
        return [("what it takes by itself is not known for this layer", "dim")]
    found = []
    for (argument, setting), default in answers.chosen.items():
        what = "prefill by " if argument == "mla_prefill" else ""
        when = f"with {setting}" if setting else "by itself"
        found.append((f"{what}{default.name}, {when} ({default.source})", "selected" if not setting else ""))
    return found


def _accepted(answer: EngineAnswer, engine: str) -> tuple[str, str]:
    row = answer.row
    kernel = "no kernel here"
    if row.backend:
        kernel = f"{row.backend} here" + (f", a kernel of {engine}'s own there" if row.own_kernel else "")
    parts = [kernel]
    if row.needs:
        parts.append(f"needs {row.needs}")
    if row.fault:
        parts.append(f"known wrong: {row.fault}")
    return f"{_name(answer)}: {'; '.join(parts)}", "warning" if row.fault else ""


def _name(answer: EngineAnswer) -> str:
    return answer.row.name + (" (prefill)" if answer.row.argument == "mla_prefill" else "")
