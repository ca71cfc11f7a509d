"""What an engine's own backends say of a layer on a device, and which one the engine takes by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attn_select.backends.reasons import block_size_reason
from attn_select.backends.spec import Reason
from attn_select.decide.condition_reasons import reasons_against
from attn_select.engines.names import EngineDefault, EngineName, EngineTable
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """One of an engine's backends, by the row of its names that is nearest to a layer."""

    row: EngineName
    reasons: list[Reason]  # against the layer; empty where it is accepted

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; ``docs/json.md`` documents the fields."""
        return {
            "name": self.row.name,
            "argument": self.row.argument,
            "accepted": not self.reasons,
            "backend": self.row.backend or None,
            "own_kernel": self.row.own_kernel or not self.row.backend,
            "needs": self.row.needs,
            "fault": self.row.fault,
            "reasons": [{"code": each.code, "message": each.message} for each in self.reasons],
            "source": self.row.source,
        }


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """All that an engine says of a layer on a device."""

    table: EngineTable
    backends: list[EngineAnswer]  # those that accept it first
    # what the engine takes by itself: by argument, then by what is set; the setting is empty by default
    chosen: dict[tuple[str, str], EngineDefault]
    refused: str  # why the engine has nothing that serves the layer as it should; empty where it has, or nobody knows
    otherwise: str = ""  # how it runs the layer, where that is not as attn-select reads it: then nothing else is said

    @property
    def by_itself(self) -> str:
        """The name that it takes by itself, MLA's prefill before its decode; ``none``, or ``-`` where nobody knows."""
        if self.refused:
            return "none"
        found = [self.chosen.get((argument, "")) for argument in ("mla_prefill", "attention")]
        return " / ".join(dict.fromkeys(each.name for each in found if each)) or "-"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; ``docs/json.md`` documents the fields."""
        chosen = [
            {"argument": argument, "setting": setting, "name": each.name, "source": each.source}
            for (argument, setting), each in self.chosen.items()
        ]
        return {
            "name": self.table.key,
            "release": self.table.release,
            "refused": self.refused,
            "otherwise": self.otherwise,
            "by_itself": self.by_itself,
            "chosen": chosen,
            "backends": [each.to_dict() for each in self.backends],
        }


def answers(table: EngineTable, config: AttentionConfig, device: Device, architecture: str) -> EngineAnswers:
    """Return what an engine says of a layer of a model (``architecture``, empty where there is none)."""
    if (otherwise := table.runs_otherwise(architecture)) is not None:
        return EngineAnswers(table, [], {}, "", otherwise.why)
    arguments = ["attention", *(["mla_prefill"] if config.mla and not config.sparse else [])]
    chosen: dict[tuple[str, str], EngineDefault] = {}
    for argument in arguments:
        for setting in dict.fromkeys(["", *(each.setting for each in table.defaults)]):
            found = table.default(config, device, argument, architecture, setting)
            by_default = chosen.get((argument, ""))
            if found is not None and (by_default is None or found.name != by_default.name):
                chosen[argument, setting] = found
    nearest: dict[tuple[str, str], EngineAnswer] = {}
    for row in table.names:
        if row.argument in arguments:
            answer = EngineAnswer(row, [*_against(table, row, config, device, architecture)])
            before = nearest.setdefault((row.name, row.argument), answer)
            if len(answer.reasons) < len(before.reasons):
                nearest[row.name, row.argument] = answer
    refused, _ = table.refuses(config, device, architecture)
    return EngineAnswers(table, sorted(nearest.values(), key=lambda each: bool(each.reasons)), chosen, refused)


def _against(
    table: EngineTable, row: EngineName, config: AttentionConfig, device: Device, architecture: str
) -> Iterator[Reason]:
    yield from reasons_against(row.when, config, device)
    if not row.is_about(architecture):
        models = ", ".join(row.architectures)
        yield Reason("model", f"serves the models {models} only", architecture, list(row.architectures))
    if why := table.not_accepted(row, architecture):
        yield Reason("model", why, architecture, None)
    size = config.block_size
    if size is not None and config.has_cache and not table.takes(row, size):
        yield block_size_reason(size, row.block_sizes)
