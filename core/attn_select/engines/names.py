"""How an engine names attn-select's backends and which arguments it has: one TOML file beside this one per engine.

``attn-select flags`` and the adapters read the same files.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from attn_select.decide.outcome import Candidate
from attn_select.decide.selection import Selection
from attn_select.engines import ENGINES
from attn_select.engines.own_kernels import rests_on_our_times
from attn_select.engines.states import StateArgument
from attn_select.errors import UnknownNameError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.models.unserved import UnservedLayers
from attn_select.machine.device import Device
from attn_select.rules.conditions import Condition, compile_when
from attn_select.rules.ranking import holds_for, holds_on


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """What is about some layers, devices and models alone."""

    when: tuple[Condition, ...] = ()  # conditions on the layer and the device, as in rules
    architectures: tuple[str, ...] = ()  # patterns of the only models that it is about; empty: all
    source: str  # file of the engine, and what to look for in it

    def is_about(self, architecture: str) -> bool:
        """Whether it is about a model."""
        return not self.architectures or _matches(architecture, self.architectures)

    def holds(self, config: AttentionConfig, device: Device, architecture: str) -> bool:
        """Whether it is about a layer of a model on a device."""
        return self.is_about(architecture) and _all_hold(self.when, config, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineName(EngineRow):
    """One of an engine's backends, where the engine runs it, and the backend of attn-select that it stands for."""

    name: str  # the engine's
    backend: str = ""  # attn-select's; empty: attn-select has no kernel for it
    argument: str = "attention"  # the key of ``EngineTable.arguments`` that takes it
    kernels: tuple[str, ...] = ()  # patterns of the names of attn-select's kernels that it stands for; empty: all
    # tokens per cache block that it takes, or multiples where the engine splits blocks; empty: all
    block_sizes: tuple[int, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    # whether the engine runs a kernel of its own under the name, not the library that attn-select runs
    own_kernel: bool = False
    fault: str = ""  # why its numbers are wrong in this release, with the issue; empty: nothing is known against it
    needs: str = ""  # what must be installed or set for it, beside the engine

    def runs(self, config: AttentionConfig, device: Device, architecture: str) -> bool:
        """Whether the engine takes the name for a layer, by whatever kernel."""
        return not self.missing(config, device, (), architecture)

    def missing(
        self, config: AttentionConfig, device: Device, kernels: Sequence[str | None], architecture: str
    ) -> list[str]:
        """Return why this is not it: the conditions that fail, and kernels and models that it does not stand for."""
        reasons = [f"where {condition}" for condition in self.when if not holds_for(condition, config, device)]
        if not self.is_about(architecture):
            reasons.append(f"for the models {', '.join(self.architectures)}")
        if self.kernels and not all(_matches(kernel or "", self.kernels) for kernel in kernels):
            reasons.append(f"for the kernels {', '.join(self.kernels)}")
        return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRefusal(EngineRow):
    """What an engine does not serve, or not as it should, whatever the backend."""

    why: str  # what stands against it
    starts: bool = False  # whether the engine starts all the same, and does something else than asked


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLayers(EngineRow):
    """Models whose layers an engine runs in another way than attn-select reads them."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDefault(EngineRow):
    """What an engine runs where no argument names a backend, for all models without one of their own."""

    name: str = ""
    order: tuple[str, ...] = ()  # in place of ``name``: the first of these that accepts the layer, by its row of names
    setting: str = ""  # what must be set for it: an environment variable, as ``NAME=1``
    argument: str = "attention"  # as in ``EngineName``
    arguments: Mapping[str, str] = field(default_factory=dict)  # what the engine sets with it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKernel(EngineRow):
    """An engine's own backend for a kind of layers that attn-select has no kernel for (``UnservedLayers``)."""

    kinds: tuple[str, ...]  # patterns of the kinds' names
    name: str
    default: bool = True  # whether it is what the engine takes there without being told


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _all_hold(conditions: Iterable[Condition], config: AttentionConfig, device: Device) -> bool:
    return all(holds_for(condition, config, device) for condition in conditions)


def _nothing(name: EngineName) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTable:
    """What is known of one release of an engine."""

    key: str  # as ``--engine`` takes it
    engine: str  # its name as people write it, and the version that was read
    release: str
    command: tuple[str, ...]  # what its server is started with; the model follows
    adapter: str | None = None  # attn-select's distribution that runs inside the engine, where there is one
    # conditions under which it brings a backend of attn-select's into the engine, by the name
    adapter_kernels: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)
    # who serves dense MLA's prefill: a backend of its own (``apart``), the decodes' (``by decode``), the prefill's in
    # every phase (``for all``), or a backend per phase (``by phase``)
    mla_prefill: Literal["apart", "by decode", "for all", "by phase"] = "by phase"
    splits_blocks: bool = False  # whether a block may be any multiple of a backend's block size
    # by what they say: ``--flag``, ``VARIABLE=`` of the environment, or a dotted key of the file that the argument
    # ``file`` names
    arguments: Mapping[str, str]
    # its names of layer kinds; empty where it takes one backend for all of them
    kinds: Mapping[str, str] = field(default_factory=dict)
    kv_cache_dtypes: Mapping[str, str] = field(default_factory=dict)  # the engine's names of KV-cache dtypes
    limits: tuple[str, ...]  # what no argument says, one sentence each
    names: tuple[EngineName, ...]  # in the order in which they are tried
    defaults: tuple[EngineDefault, ...] = ()  # what runs without an argument; the first that fits
    own_defaults: tuple[str, ...] = ()  # architectures for which the engine has defaults of its own
    unserved: tuple[EngineKernel, ...] = ()  # its own backends for kinds of layers that attn-select has none for
    # conditions under which ``auto`` is another dtype in the engine, so that it is always said
    explicit_kv_cache: tuple[Condition, ...] | None = None
    cache_is_dtype: bool = False  # whether a 16-bit cache must be of the model's dtype
    states_batch_invariant: bool = True  # whether layers that keep a state are served with batch invariance
    # models whose KV heads the engine never copies, so that no more ranks than KV heads share them
    kv_heads_divided: tuple[str, ...] = ()
    # by patterns of models' classes the only names that such a model takes
    accepts: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    refusals: tuple[EngineRefusal, ...] = ()  # what it does not serve as it should, whatever the backend
    # devices on which ``names`` hold all that the engine has under ``attention``: it refuses where none holds
    lists_all: tuple[tuple[Condition, ...], ...] = ()
    other_layers: tuple[OtherLayers, ...] = ()  # models whose layers it runs in another way
    states: tuple[StateArgument, ...] = ()  # arguments that name kernels of layers that keep a state

    def refuses(self, config: AttentionConfig, device: Device, architecture: str) -> tuple[str, bool]:
        """Return why the engine has nothing that serves a layer as it should, and whether it starts all the same."""
        for each in self.refusals:
            if each.holds(config, device, architecture):
                return f"{self.engine} {self.release}: {each.why}", each.starts
        stored = config.cache_dtype
        if self.cache_is_dtype and stored in ("float16", "bfloat16") and stored != config.dtype:
            text = f"{self.engine} {self.release} refuses a KV cache of {stored} for layers computed in {config.dtype}"
            return text, False
        if not any(_all_hold(each, config, device) for each in self.lists_all):
            return "", False
        by_itself = [name for each in self._defaults(config, device, "attention", architecture) for name in each.order]
        named = [row for row in self.names if row.backend or row.name in by_itself]
        rows = [row for row in named if row.argument == "attention" and row.runs(config, device, architecture)]
        if any(not row.fault for row in rows):
            return "", False
        if rows:
            return f"{self.engine} {self.release} has {rows[0].name} alone for them on this GPU: {rows[0].fault}", True
        return f"{self.engine} {self.release} has no backend for them on this GPU, and refuses to start", False

    def runs_otherwise(self, architecture: str) -> OtherLayers | None:
        """Return how the engine runs a model's layers, where that is not as attn-select reads them."""
        return next((each for each in self.other_layers if _matches(architecture, each.architectures)), None)

    def default(
        self, config: AttentionConfig, device: Device, argument: str, architecture: str, setting: str = ""
    ) -> EngineDefault | None:
        """Return what the engine runs for a layer where no argument names a backend; None where that is not known."""
        for each in self._defaults(config, device, argument, architecture, setting):
            if each.name:
                return each
            rows = (self.accepting(name, argument, config, device, architecture) for name in each.order)
            found = next((row for row in rows if row is not None), None)
            return None if found is None else replace(each, name=found.name)
        return None

    def _defaults(
        self, config: AttentionConfig, device: Device, argument: str, architecture: str, setting: str = ""
    ) -> Iterator[EngineDefault]:
        for each in self.defaults:
            if each.argument != argument or (not each.architectures and architecture in self.own_defaults):
                continue
            if each.setting in ("", setting) and each.holds(config, device, architecture):
                yield each

    def accepting(
        self, name: str, argument: str, config: AttentionConfig, device: Device, architecture: str
    ) -> EngineName | None:
        """Return the row by which a backend of the engine accepts a layer and its block size; None where none does."""
        size = config.block_size if config.has_cache else None
        rows = (row for row in self.names if (row.name, row.argument) == (name, argument))
        fits = (row for row in rows if size is None or self.takes(row, size))
        return next((row for row in fits if row.runs(config, device, architecture)), None)

    def kernels_of(self, layers: UnservedLayers, device: Device) -> list[EngineKernel]:
        """Return what the engine runs layers with that attn-select has no kernel for, its default first."""
        found = [
            row
            for row in self.unserved
            if _matches(layers.kind, row.kinds) and all(holds_on(condition, device) for condition in row.when)
        ]
        return sorted(found, key=lambda row: not row.default)

    def says_auto(self, selection: Selection) -> bool:
        """Whether ``auto`` as a KV-cache dtype means something else in the engine, for a layer."""
        conditions = self.explicit_kv_cache
        return conditions is not None and _all_hold(conditions, selection.config, selection.device)

    def takes(self, name: EngineName, block_size: int) -> bool:
        """Whether a backend of the engine runs with cache blocks of so many tokens."""
        sizes = name.block_sizes
        return not sizes or block_size in sizes or (self.splits_blocks and any(block_size % s == 0 for s in sizes))

    def adapter_runs(self, backend: str, config: AttentionConfig, device: Device) -> bool:
        """Whether the adapter brings attn-select's kernels of a backend into the engine, for a layer."""
        conditions = self.adapter_kernels.get(backend)
        return conditions is not None and _all_hold(conditions, config, device)

    def names_of(self, backend: str, argument: str = "attention") -> tuple[str, ...]:
        """Return the engine's names for one of attn-select's backends, in the order in which they are tried."""
        rows = [row.name for row in self.names if (row.backend, row.argument) == (backend, argument)]
        return tuple(dict.fromkeys(rows))

    def has_own_kernel(self, backend: str) -> bool:
        """Whether the engine runs a kernel of its own under the name of one of attn-select's backends."""
        return any(row.own_kernel for row in self.names if row.backend == backend)

    def offers(
        self,
        selection: Selection,
        phases: Sequence[Phase],
        argument: str,
        lacks: Callable[[EngineName], str] = _nothing,
        architecture: str = "",
    ) -> list[Offer]:
        """Return attn-select's order for these phases of a layer, each with the engine's name or why it has none."""
        ranked = selection.ranked(phases)
        found = [self._offer(candidate, selection, phases, argument, lacks, architecture) for candidate in ranked]
        offers: list[Offer] = []
        for place, offer in enumerate(found):
            before: list[int] = []
            if offer.name is not None and offer.name.own_kernel:
                for later, other in enumerate(found[place + 1 :], place + 1):
                    if other.name and rests_on_our_times(selection, offer.backend, phases[-1], other.backend):
                        before.append(later)
            why = (
                f"only times of attn-select's kernel put it there, and {self.engine} runs one of its own"
                if before
                else offer.why
            )
            offers.append(replace(offer, why=why, place=before[-1] + 0.5 if before else place))
        return offers

    def takes_a_pair(
        self, selection: Selection, lacks: Callable[[EngineName], str] = _nothing, architecture: str = ""
    ) -> bool:
        """Whether a layer's phases take two backends, and not by times of attn-select's own kernels alone."""
        if len(set(selection.selected.values())) < 2:
            return False
        phases = selection.config.phases
        orders = [self.offers(selection, (phase,), "attention", lacks, architecture) for phase in phases]
        named = [[(offer.place, offer.name.name, offer.why) for offer in order if offer.name] for order in orders]
        moved = any(why for order in named for _, _, why in order)
        return not moved or len({min(order)[1] for order in named if order}) > 1

    def not_accepted(self, name: EngineName, architecture: str) -> str:
        """Return why a model does not take a name, which stands for a backend of other models; empty where it does."""
        for patterns, names in self.accepts.items():
            if name.argument == "attention" and name.name not in names and _matches(architecture, patterns):
                return f"for other models: {architecture} takes {', '.join(names)}"
        return ""

    def divides_kv_heads(self, architecture: str) -> bool:
        """Whether the engine never copies a model's KV heads, so that no more ranks than KV heads share them."""
        return _matches(architecture, self.kv_heads_divided)

    def _offer(
        self,
        candidate: Candidate,
        selection: Selection,
        phases: Sequence[Phase],
        argument: str,
        lacks: Callable[[EngineName], str],
        architecture: str,
    ) -> Offer:
        plans = [plan for phase in phases if (plan := candidate.phases[phase].plan) is not None]
        kernels = [plan.kernel_name for plan in plans]
        block_size = selection.block_size
        if selection.selected[phases[-1]] != candidate.backend and plans[-1].kernel_block_sizes and block_size:
            block_size = selection.config.block_size or plans[-1].kernel_block_sizes[0]
        failed: list[list[str]] = []
        for name in self.names:
            if (name.backend, name.argument) == (candidate.backend, argument):
                missing = name.missing(selection.config, selection.device, kernels, architecture)
                if why := lacks(name) or self.not_accepted(name, architecture):
                    missing.append(why)
                if not missing and (name.fault or name.needs):
                    against = name.fault or f"needs {name.needs}"
                    return Offer(candidate.backend, None, f"{name.name} of {self.engine}: {against}", block_size)
                if not missing:
                    return Offer(candidate.backend, name, "", block_size)
                failed.append(missing)
        nearest = min(failed, key=len, default=None)
        text = f"{self.engine} has it {' and '.join(nearest)}" if nearest else f"{self.engine} has no such backend"
        return Offer(candidate.backend, None, text, block_size)


@dataclass(frozen=True, slots=True)
class Offer:
    """One backend of attn-select's order, as an engine has it."""

    backend: str
    name: EngineName | None  # the engine's; None where it has none
    why: str  # why it has none, or why the one that it has comes later; else empty
    block_size: int | None  # tokens per cache block that attn-select would give it; None for layers without a cache
    place: float = 0  # in the order for this engine, least first


_ROWS = {
    "names": EngineName,
    "defaults": EngineDefault,
    "unserved": EngineKernel,
    "refusals": EngineRefusal,
    "other_layers": OtherLayers,
    "states": StateArgument,
}
"""Tables of an engine's file that are lists, each with what a row is."""


def engine_table(key: str) -> EngineTable:
    """Return what is known of the engine that ``--engine`` calls so; UnknownNameError where there is none."""
    if key not in ENGINES:
        raise UnknownNameError("engine", key, ENGINES)
    data = tomllib.loads((Path(__file__).with_name(f"{key}.toml")).read_text("utf-8"))
    for name, kind in _ROWS.items():
        data[name] = tuple(kind(**_values(row)) for row in data.get(name, ()))
    kernels = data.get("adapter_kernels", {})
    data["adapter_kernels"] = {backend: compile_when(when)[0] for backend, when in kernels.items()}
    if "explicit_kv_cache" in data:
        data["explicit_kv_cache"] = compile_when(data["explicit_kv_cache"])[0]
    data["lists_all"] = tuple(compile_when(each)[0] for each in data.get("lists_all", ()))
    data["accepts"] = {tuple(row["architectures"]): tuple(row["names"]) for row in data.get("accepts", ())}
    return EngineTable(key=key, **_values(data))


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table's values as the fields of a dataclass: conditions compiled, lists as tuples."""
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return found | ({"when": compile_when(row["when"])[0]} if "when" in row else {})
