"""An explanation's choice as an engine's arguments, environment and configuration file, and what these cannot say."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_select.decide.selection import Selection
from attn_select.engines.names import EngineDefault, EngineKernel, EngineTable, Offer, OtherLayers
from attn_select.engines.states import TakenState, taken_states
from attn_select.layer.config import Phase
from attn_select.layer.models.unserved import UnservedLayers
from attn_select.layer.state import StateConfig
from attn_select_cli.explanation import Explanation, LayerExplanation

FILE_NAME = "attn-select.yaml"
"""What the configuration file is called in commands."""
_WITH_ARGUMENTS = (
    "dtype", "kv_cache_dtype", "block_size", "batch_invariant", "decode_context_parallel_size", "state_dtype",
)  # fmt: skip
"""Fields of ``AttentionConfig`` for which engines have arguments."""


@dataclass(slots=True)
class Taken:
    """What one argument that names a backend says for one kind of layers."""

    layer: LayerExplanation
    argument: str  # key of ``EngineTable.arguments``
    phases: Sequence[Phase]  # the ones whose order it is chosen by
    offers: Sequence[Offer]  # attn-select's order for these
    offer: Offer | None = None  # the one that is taken; None where the engine has none of the order
    default: EngineDefault | None = None  # what the engine runs without the argument, where that is known
    # whether the engine's own choice stands: nothing was measured on this device, and attn-select ranks what it has
    stands: bool = False
    refused: str = ""  # why the engine has nothing that serves the layers; empty where it has, or nobody knows
    starts: bool = False  # whether the engine starts where it is refused, with wrong outputs
    follows: Sequence[Phase] = ()  # phases that go with it

    @property
    def served(self) -> list[Phase]:
        """The phases that it serves."""
        return [*self.follows, *self.phases]

    @property
    def is_default(self) -> bool:
        """Whether the engine takes the same without being told."""
        name = self.offer.name if self.offer else None
        if name is None or self.default is None:
            return False
        return (name.name, dict(name.arguments)) == (self.default.name, dict(self.default.arguments))

    def passed_over(self) -> list[tuple[str, str]]:
        """Return the backends of the order that come before the one taken, each with the reason."""
        before = self.offers[: self.offers.index(self.offer)] if self.offer else self.offers
        return [(each.backend, each.why or f"{_name(each)} does not fit all layers") for each in before]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; ``docs/json.md`` documents the fields."""
        name = self.offer.name if self.offer else None
        return {
            "kind": self.layer.kind,
            "count": self.layer.count,
            "phases": self.served,
            "selected": self.layer.selection.selected[self.phases[-1]],
            "backend": self.offer.backend if self.offer else None,
            "engine_backend": name.name if name else None,
            "engine_default": self.default.name if self.default and not self.refused else None,
            "source": name.source if name else None,
            "default": self.default.source if self.default and self.is_default else None,
            "passed_over": [{"backend": backend, "why": why} for backend, why in self.passed_over()],
        }


@dataclass(slots=True)
class EngineArguments:
    """How an engine is told to take a choice."""

    table: EngineTable
    # which of attn-select's backends the arguments stand for, layer kind by layer kind
    taken: list[Taken] = field(default_factory=list)
    # command-line arguments by flag; None for one without a value
    arguments: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    file: dict[str, str | int] = field(default_factory=dict)  # dotted keys of the configuration file
    # what the choice says and no argument does, one sentence each
    not_expressed: list[str] = field(default_factory=list)
    # what it is told for layers that keep a state, layer kind by layer kind
    states: list[tuple[LayerExplanation, TakenState]] = field(default_factory=list)
    # how the engine runs the model's layers, where that is not as attn-select reads them
    otherwise: OtherLayers | None = None
    # layers that attn-select has no kernel for, each with the engine's own, its default first
    unserved: list[tuple[UnservedLayers, list[EngineKernel]]] = field(default_factory=list)

    @property
    def refused(self) -> str:
        """Why the engine cannot serve the model as it should; empty where it can, or nobody knows."""
        refused = [each for each in self.taken if each.refused]
        texts = [f"{each.layer.kind} layers ({', '.join(each.served)}): {each.refused}" for each in refused]
        return "; ".join(dict.fromkeys(texts))

    @property
    def starts(self) -> bool:
        """Whether the engine starts where ``refused`` says something, with wrong outputs."""
        return all(each.starts for each in self.taken if each.refused)

    @property
    def ok(self) -> bool:
        """Whether every kind of layers has a backend of the engine in every phase."""
        served = all(kernels for _, kernels in self.unserved)
        return served and not self.refused and all(taken.offer is not None or taken.stands for taken in self.taken)

    def argument_list(self) -> list[str]:
        """Return the command-line arguments, the configuration file's among them."""
        return [word for pair in self.argument_pairs() for word in pair]

    def argument_pairs(self) -> Iterator[list[str]]:
        """Yield each argument with its value."""
        for flag, value in self.arguments.items():
            yield [flag] if value is None else [flag, value]
        if self.file:
            yield [self.table.arguments["file"], FILE_NAME]

    def nested_file(self) -> dict[str, Any]:
        """Return the configuration file's content."""
        content: dict[str, Any] = {}
        for key, value in self.file.items():
            *tables, last = key.split(".")
            inner = content
            for table in tables:
                inner = inner.setdefault(table, {})
            inner[last] = value
        return content

    def say(self, what: str, value: str | int, key: str = "", otherwise: str = "") -> bool:
        """Put a value where the engine reads it, with ``key`` behind the argument's name; False if it does nowhere, and
        ``otherwise`` becomes what is not expressed."""
        argument = self.table.arguments.get(what)
        if argument is None:
            self.not_expressed += [otherwise] if otherwise else []
            return False
        if argument.startswith("--"):
            self.arguments[argument + key] = None if value is True else str(value)
        elif argument.endswith("="):
            self.environment[argument.removesuffix("=")] = str(int(value) if value is True else value)
        else:
            self.file[argument] = value
        return True


def engine_arguments(
    explanation: Explanation, table: EngineTable, tensor_parallel: int, overrides: Mapping[str, Any]
) -> EngineArguments:
    """Return what tells an engine to take an explanation's choice."""
    architecture = explanation.model["architecture"] if explanation.model else ""
    result = EngineArguments(table, otherwise=table.runs_otherwise(architecture))
    result.unserved = [(each, table.kernels_of(each, explanation.device)) for each in explanation.unserved]
    result.taken = _taken(explanation, table, architecture, result.otherwise)
    _say_backends(result)
    _say_states(result, explanation, overrides)
    _say_dtypes(result, explanation)
    _say_block_size(result, "block_size" in overrides)
    if tensor_parallel > 1:
        text = f"tensor parallelism over {tensor_parallel} ranks: no argument says so"
        result.say("tensor_parallel", tensor_parallel, otherwise=text)
    for config in [layer.selection.config for layer in explanation.attention[:1]]:
        if config.batch_invariant:
            result.say("batch_invariant", True, otherwise=f"batch invariance: {table.engine} has no argument for it")
        if (ranks := config.decode_context_parallel_size) > 1:
            text = f"decode context parallelism over {ranks} ranks: {table.engine} has no argument for it"
            result.say("decode_context_parallel_size", ranks, otherwise=text)
    # The model's config says the rest.
    others = {option: value for option, value in overrides.items() if option not in _WITH_ARGUMENTS}
    for option, value in others.items():
        text = f"{option} = {value}: {table.engine} takes it from the model or from other features"
        result.not_expressed.append(text)
    result.not_expressed += table.limits
    return result


def _taken(explanation: Explanation, table: EngineTable, model: str, otherwise: OtherLayers | None) -> list[Taken]:
    split = "prefill" in table.arguments and any(
        table.takes_a_pair(layer.selection, architecture=model) for layer in explanation.attention
    )
    found = [
        Taken(
            layer,
            argument,
            phases,
            [] if otherwise else table.offers(layer.selection, phases, _named_by(argument), architecture=model),
            default=table.default(layer.selection.config, layer.selection.device, _named_by(argument), model),
        )
        for layer in explanation.attention
        for argument, phases in _places(table, layer.selection, split)
    ]
    for taken in found:
        if taken.argument != "mla_prefill" and not otherwise:
            config, device = taken.layer.selection.config, taken.layer.selection.device
            taken.refused, taken.starts = table.refuses(config, device, model)
        if table.mla_prefill == "by decode" and taken.phases == ("decode",):
            taken.follows = ("prefill",)
    if not otherwise and all(_stands(taken, table, model) for taken in found):
        for taken in found:
            taken.stands, taken.offers = True, []
    for argument in dict.fromkeys(taken.argument for taken in found):
        same = [taken for taken in found if taken.argument == argument]
        if not table.kinds:
            _take_one(same)
        else:
            for taken in same:
                taken.offer = min(_with_a_name(taken), key=_place, default=None)
    return found


def _stands(taken: Taken, table: EngineTable, model: str) -> bool:
    """Whether an engine's own choice stands on a device where attn-select measured nothing, and has nothing by name."""
    selection = taken.layer.selection
    config, device = selection.config, selection.device
    if device.arch is None or taken.default is None or selection.explicit:
        return False
    row = table.accepting(taken.default.name, _named_by(taken.argument), config, device, model)
    return row is None or not row.fault


def _places(table: EngineTable, selection: Selection, split: bool) -> list[tuple[str, Sequence[Phase]]]:
    """Return the arguments that name a backend for a layer, each with the phases that it speaks for."""
    phases = selection.config.phases
    if selection.config.mla and not selection.config.sparse:
        by_table: dict[str, list[tuple[str, Sequence[Phase]]]] = {
            "apart": [("attention", ("decode",)), ("mla_prefill", ("prefill",))],
            "by decode": [("attention", ("decode",))],
            "for all": [("attention", ("prefill",))],
        }
        if table.mla_prefill in by_table:
            return by_table[table.mla_prefill]
    return [(phase, (phase,)) for phase in phases] if split else [("attention", phases)]


def _named_by(argument: str) -> str:
    """Return the argument whose names an argument takes: one for a single phase takes those for all."""
    return "attention" if argument in ("prefill", "decode") else argument


def _take_one(several: Sequence[Taken]) -> None:
    """Take the engine's backend that stands least far behind in the orders of all layer kinds together."""
    named = [
        {_name(offer): offer for offer in sorted(_with_a_name(taken), key=_place, reverse=True)} for taken in several
    ]
    common = [name for name in named[0] if all(name in each for each in named)]
    if common:
        best = min(common, key=lambda name: sum(each[name].place for each in named))
        for taken, each in zip(several, named, strict=True):
            taken.offer = each[best]


def _with_a_name(taken: Taken) -> list[Offer]:
    return [offer for offer in taken.offers if offer.name is not None]


def _place(offer: Offer) -> float:
    return offer.place


def _name(offer: Offer) -> str:
    return offer.name.name if offer.name else ""


def _say_backends(result: EngineArguments) -> None:
    by_argument: dict[str, dict[str, int]] = {}
    groups: dict[str, list[Taken]] = {}
    for taken in result.taken:
        groups.setdefault(_named_by(taken.argument), []).append(taken)
    # An engine takes its default for all layers and phases, or what it is told.
    told = [taken for same in groups.values() for taken in same if not all(each.is_default for each in same)]
    for taken in told:
        if taken.offer is not None and taken.offer.name is not None:
            counts = by_argument.setdefault(taken.argument, {})
            counts[taken.offer.name.name] = counts.get(taken.offer.name.name, 0) + taken.layer.count
    # An argument speaks for all kinds: where one has no backend, it would be given another kind's.
    by_kind = {taken.argument for taken in result.taken if taken.offer is None}
    both = set(by_argument) == {"prefill", "decode"} and not by_kind & by_argument.keys()
    if both and by_argument["prefill"].keys() == by_argument["decode"].keys():
        by_argument = {"attention": by_argument["decode"]}
    most = {
        argument: max(counts, key=lambda name: counts[name])
        for argument, counts in by_argument.items()
        if argument not in by_kind
    }
    for argument, engine_backend in most.items():
        result.say(argument, engine_backend)
    for taken in told:
        if taken.offer is None or taken.offer.name is None:
            continue
        name = taken.offer.name
        alone = taken.argument in by_kind or name.name != most.get(taken.argument, name.name)
        kind, kinds = taken.layer.kind, result.table.kinds
        if alone and not (kind in kinds and result.say("of_kind", name.name, kinds[kind])):
            one = f"{result.table.engine} takes one for all layers"
            result.not_expressed.append(f"{name.name} for {kind} layers: {one}")
        result.arguments |= name.arguments


def _say_states(result: EngineArguments, explanation: Explanation, overrides: Mapping[str, Any]) -> None:
    for layer in explanation.layers:
        if isinstance(layer.selection.config, StateConfig):
            result.states += [(layer, taken) for taken in taken_states(result.table.states, layer.selection)]
    for _, taken in result.states:
        if taken.row is not None and taken.value is not None:
            result.arguments[taken.row.argument] = taken.value
    if result.states and "state_dtype" in overrides:
        result.say("state_dtype", overrides["state_dtype"])


def _say_dtypes(result: EngineArguments, explanation: Explanation) -> None:
    table = result.table
    configs = [layer.selection.config for layer in explanation.attention]
    for dtype in dict.fromkeys((*(config.dtype for config in configs), *(u.dtype for u in explanation.unserved))):
        result.say("dtype", dtype)
    written = [unserved.cache_dtype for unserved in explanation.unserved if unserved.cache_dtype != unserved.dtype]
    written += [
        layer.selection.config.cache_dtype
        for layer in explanation.attention
        if layer.selection.config.kv_cache_dtype != "auto" or table.says_auto(layer.selection)
    ]
    for stored in dict.fromkeys(written):
        if stored not in table.kv_cache_dtypes or not result.say("kv_cache_dtype", table.kv_cache_dtypes[stored]):
            known = ", ".join(table.kv_cache_dtypes) or "the model's dtype alone"
            result.not_expressed.append(f"a KV cache of {stored}: {table.engine} stores {known}")


def _say_block_size(result: EngineArguments, by_option: bool) -> None:
    """Say the block size where it was asked for, or where a backend that the engine is told to take needs it.

    Where any size will do, the engine's own is better: SGLang's prefix cache reuses single tokens.
    """
    if "block_size" not in result.table.arguments:
        return
    offers = [(each, each.offer) for each in result.taken if each.offer is not None and each.argument != "mla_prefill"]
    told = [
        offer
        for taken, offer in offers
        if by_option or not (taken.is_default or (offer.name is not None and not offer.name.block_sizes))
    ]
    sizes = list(dict.fromkeys(offer.block_size for offer in told if offer.block_size is not None))
    if len(sizes) > 1:
        text = " and ".join(map(str, sizes))
        result.not_expressed.append(f"block sizes {text} by layer kind: {result.table.engine} chooses one")
        return
    for size in sizes:
        names = [offer.name for _, offer in offers if offer.name is not None and offer.block_size is not None]
        unfit = [name for name in names if not result.table.takes(name, size)]
        if not unfit:
            result.say("block_size", size)
            continue
        accepted = " or ".join(map(str, unfit[0].block_sizes))
        multiples = "multiples of " if result.table.splits_blocks else ""
        text = f"blocks of {size} tokens: {unfit[0].name} takes {multiples}{accepted}"
        result.not_expressed.append(f"{text}, of which {result.table.engine} chooses")


def command_lines(result: EngineArguments, model: str) -> list[str]:
    """Return the command that starts the engine's server, over several lines of a shell."""
    pieces = [f"{name}={shlex.quote(value)}" for name, value in result.environment.items()]
    pieces.append(shlex.join([*result.table.command, model]))
    pieces += [shlex.join(pair) for pair in result.argument_pairs()]
    start = len(result.environment) + 1
    pieces[start:] = [f"  {piece}" for piece in pieces[start:]]
    return [f"{piece} \\" for piece in pieces[:-1]] + pieces[-1:]


def file_lines(content: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield nested tables of names and numbers as YAML."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from file_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {value}"
