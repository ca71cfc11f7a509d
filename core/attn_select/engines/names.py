"""How an engine names attn-select's backends and which arguments it has: one TOML file beside this one per engine.

``attn-select flags`` and the adapters read the same files.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from attn_select.decide.outcome import Candidate
from attn_select.decide.selection import Selection
from attn_select.engines.own_kernels import rests_on_our_times
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.models.unserved import UnservedLayers
from attn_select.machine.device import Device
from attn_select.rules.conditions import Condition, compile_when
from attn_select.rules.ranking import holds_for, holds_on


@dataclass(frozen=True, slots=True)
class EngineName:
    """An engine's name for one of attn-select's backends, and where it has it.

    Attributes:
        backend: attn-select's name.
        name: the engine's.
        argument: the key of ``EngineTable.arguments`` that takes it.
        when: conditions on the layer and the device, as in rules: there the engine runs it.
        kernels: patterns of the stable names of attn-select's kernels that it stands for; empty: of all.
        block_sizes: tokens per cache block that it takes, or multiples where the engine splits blocks; empty: all.
        arguments: what goes with it.
        own_kernel: whether the engine runs a kernel of its own under the name, not the library that attn-select runs.
        architectures: patterns of the only models that it is for; empty: all.
        fault: why its numbers are wrong in this release, with the issue; empty: nothing is known against it.
        source: file of the engine, and what to look for in it.
    """

    backend: str
    name: str
    argument: str
    when: tuple[Condition, ...]
    kernels: tuple[str, ...]
    block_sizes: tuple[int, ...]
    arguments: Mapping[str, str]
    own_kernel: bool
    architectures: tuple[str, ...]
    fault: str
    source: str

    def runs(self, config: AttentionConfig, device: Device, architecture: str) -> bool:
        """Whether the engine takes the name for a layer, by whatever kernel."""
        return not self.missing(config, device, (), architecture)

    def missing(
        self, config: AttentionConfig, device: Device, kernels: Sequence[str | None], architecture: str
    ) -> list[str]:
        """Return why this is not it: the conditions that fail, and kernels and models that it does not stand for."""
        reasons = [f"where {condition}" for condition in self.when if not holds_for(condition, config, device)]
        if not _is_about(architecture, self.architectures):
            reasons.append(f"for the models {', '.join(self.architectures)}")
        if self.kernels and not all(any(fnmatch.fnmatchcase(k or "", p) for p in self.kernels) for k in kernels):
            reasons.append(f"for the kernels {', '.join(self.kernels)}")
        return reasons


@dataclass(frozen=True, slots=True)
class EngineRefusal:
    """What an engine does not serve, or not as it should, whatever the backend.

    Attributes:
        when: conditions on the layer and the device.
        architectures: patterns of the only models that it is about; empty: all.
        why: what stands against it.
        starts: whether the engine starts all the same, and does something else than asked.
        source: file of the engine, and what to look for in it.
    """

    when: tuple[Condition, ...]
    architectures: tuple[str, ...]
    why: str
    starts: bool
    source: str

    def holds(self, config: AttentionConfig, device: Device, architecture: str) -> bool:
        """Whether it is about a layer of a model."""
        return _is_about(architecture, self.architectures) and _all_hold(self.when, config, device)


@dataclass(frozen=True, slots=True)
class OtherLayers:
    """Models whose layers an engine runs in another way than attn-select reads them.

    Attributes:
        architectures: patterns of the models' classes.
        why: what the engine does instead.
        source: file of the engine, and what to look for in it.
    """

    architectures: tuple[str, ...]
    why: str
    source: str


@dataclass(frozen=True, slots=True)
class EngineDefault:
    """What an engine runs where no argument names a backend.

    Attributes:
        name: the engine's name.
        argument: as in ``EngineName``.
        when: conditions on the layer and the device.
        architectures: patterns of the only models that it is for; empty: all without a default of their own.
        arguments: what the engine sets with it.
        source: file and line of the engine.
    """

    name: str
    argument: str
    when: tuple[Condition, ...]
    architectures: tuple[str, ...]
    arguments: Mapping[str, str]
    source: str


@dataclass(frozen=True, slots=True)
class EngineKernel:
    """An engine's own backend for a kind of layers that attn-select has no kernel for (``UnservedLayers``).

    The engine takes it by itself, or the model's own code does.

    Attributes:
        kinds: patterns of the kinds' names.
        name: what the engine calls it.
        when: conditions on the device.
        default: whether it is what the engine takes there without being told.
        source: file of the engine, and what to look for in it.
    """

    kinds: tuple[str, ...]
    name: str
    when: tuple[Condition, ...]
    default: bool
    source: str


def _is_one(architecture: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(architecture, pattern) for pattern in patterns)


def _is_about(architecture: str, patterns: Sequence[str]) -> bool:
    return not patterns or _is_one(architecture, patterns)


def _all_hold(conditions: Iterable[Condition], config: AttentionConfig, device: Device) -> bool:
    return all(holds_for(condition, config, device) for condition in conditions)


def _nothing(name: EngineName) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class EngineTable:
    """What is known of one release of an engine.

    Attributes:
        key: as ``--engine`` takes it.
        engine, release: its name as people write it, and the version that was read.
        command: what its server is started with; the model follows.
        adapter: attn-select's distribution that runs inside the engine, where there is one.
        adapter_kernels: conditions under which it brings a backend of attn-select's into the engine, by the name.
        mla_prefill: who serves dense MLA's prefill: a backend of its own (``apart``), the decodes' (``by decode``), the
            prefill's in every phase (``for all``), or a backend per phase (``by phase``).
        splits_blocks: whether a block may be any multiple of a backend's block size.
        arguments: by what they say: ``--flag``, ``VARIABLE=`` of the environment, or a dotted key of the file that the
            argument ``file`` names.
        kinds: the engine's names of layer kinds; empty where it takes one backend for all kinds.
        kv_cache_dtypes: the engine's names of KV-cache dtypes.
        limits: what no argument says, one sentence each.
        names: in the order in which they are tried.
        defaults: what runs without an argument; the first that fits.
        own_defaults: architectures for which the engine has defaults of its own.
        unserved: its own backends for kinds of layers that attn-select has none for.
        explicit_kv_cache: conditions under which ``auto`` is another dtype in the engine, so that it is always said.
        cache_is_dtype: whether a 16-bit cache must be of the model's dtype.
        states_batch_invariant: whether layers that keep a state are served with batch invariance.
        kv_heads_divided: models whose KV heads the engine never copies, so that no more ranks than KV heads share them.
        accepts: by patterns of models' classes the only names that such a model takes.
        refusals: what it does not serve as it should, whatever the backend.
        lists_all: conditions under which ``names`` hold all of the engine's under ``attention``, so that it refuses
            where none holds; None: nowhere.
        other_layers: models whose layers it runs in another way.
    """

    key: str
    engine: str
    release: str
    command: tuple[str, ...]
    adapter: str | None
    adapter_kernels: Mapping[str, tuple[Condition, ...]]
    mla_prefill: Literal["apart", "by decode", "for all", "by phase"]
    splits_blocks: bool
    arguments: Mapping[str, str]
    kinds: Mapping[str, str]
    kv_cache_dtypes: Mapping[str, str]
    limits: tuple[str, ...]
    names: tuple[EngineName, ...]
    defaults: tuple[EngineDefault, ...]
    own_defaults: tuple[str, ...]
    unserved: tuple[EngineKernel, ...]
    explicit_kv_cache: tuple[Condition, ...] | None
    cache_is_dtype: bool
    states_batch_invariant: bool
    kv_heads_divided: tuple[str, ...]
    accepts: Mapping[tuple[str, ...], tuple[str, ...]]
    refusals: tuple[EngineRefusal, ...]
    lists_all: tuple[Condition, ...] | None
    other_layers: tuple[OtherLayers, ...]

    def refuses(self, config: AttentionConfig, device: Device, architecture: str) -> tuple[str, bool]:
        """Return why the engine has nothing that serves a layer as it should, and whether it starts all the same.

        The first is empty where it has something, or where nobody knows.

        Args:
            architecture: the model's class; empty: unknown.
        """
        for each in self.refusals:
            if each.holds(config, device, architecture):
                return f"{self.engine} {self.release}: {each.why}", each.starts
        stored = config.cache_dtype
        if self.cache_is_dtype and stored in ("float16", "bfloat16") and stored != config.dtype:
            text = f"{self.engine} {self.release} refuses a KV cache of {stored} for layers computed in {config.dtype}"
            return text, False
        if self.lists_all is None or not _all_hold(self.lists_all, config, device):
            return "", False
        rows = [row for row in self.names if row.argument == "attention" and row.runs(config, device, architecture)]
        if any(not row.fault for row in rows):
            return "", False
        if rows:
            return f"{self.engine} {self.release} has {rows[0].name} alone for them on this GPU: {rows[0].fault}", True
        return f"{self.engine} {self.release} has no backend for them on this GPU, and refuses to start", False

    def runs_otherwise(self, architecture: str) -> OtherLayers | None:
        """Return how the engine runs a model's layers, where that is not as attn-select reads them."""
        return next((each for each in self.other_layers if _is_one(architecture, each.architectures)), None)

    def default(self, selection: Selection, argument: str, architecture: str) -> EngineDefault | None:
        """Return what the engine runs for a layer where no argument names a backend; None where that is not known.

        Args:
            argument: as in ``EngineName``.
            architecture: the model's class; empty: unknown.
        """
        for each in self.defaults:
            if each.argument != argument or (not each.architectures and architecture in self.own_defaults):
                continue
            if each.architectures and architecture not in each.architectures:
                continue
            if _all_hold(each.when, selection.config, selection.device):
                return each
        return None

    def kernels_of(self, layers: UnservedLayers, device: Device) -> list[EngineKernel]:
        """Return what the engine runs layers with that attn-select has no kernel for, its default first."""
        found = [
            row
            for row in self.unserved
            if any(fnmatch.fnmatchcase(layers.kind, pattern) for pattern in row.kinds)
            and all(holds_on(condition, device) for condition in row.when)
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
        """Return attn-select's order for these phases of a layer, each with the engine's name or why it has none.

        An engine's own kernel has the place that it has without the times of attn-select's kernel.

        Args:
            selection: of the layer.
            phases: the phases.
            argument: as in ``EngineName``.
            lacks: says why the engine at hand does not have a name; empty where it has it.
            architecture: the model's class; empty: unknown.
        """
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
        """Whether a layer's phases take two backends, and not by times of attn-select's own kernels alone.

        Args:
            lacks, architecture: as in ``offers``.
        """
        if len(set(selection.selected.values())) < 2:
            return False
        phases = selection.config.phases
        orders = [self.offers(selection, (phase,), "attention", lacks, architecture) for phase in phases]
        named = [[(offer.place, offer.name.name, offer.why) for offer in order if offer.name] for order in orders]
        moved = any(why for order in named for _, _, why in order)
        return not moved or len({min(order)[1] for order in named if order}) > 1

    def _not_accepted(self, name: EngineName, architecture: str) -> str:
        for patterns, names in self.accepts.items():
            if name.argument == "attention" and name.name not in names and _is_one(architecture, patterns):
                return f"for other models: {architecture} takes {', '.join(names)}"
        return ""

    def divides_kv_heads(self, architecture: str) -> bool:
        """Whether the engine never copies a model's KV heads, so that no more ranks than KV heads share them."""
        return _is_one(architecture, self.kv_heads_divided)

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
                if why := lacks(name) or self._not_accepted(name, architecture):
                    missing.append(why)
                if not missing and name.fault:
                    return Offer(candidate.backend, None, f"{name.name} of {self.engine}: {name.fault}", block_size)
                if not missing:
                    return Offer(candidate.backend, name, "", block_size)
                failed.append(missing)
        nearest = min(failed, key=len, default=None)
        text = f"{self.engine} has it {' and '.join(nearest)}" if nearest else f"{self.engine} has no such backend"
        return Offer(candidate.backend, None, text, block_size)


@dataclass(frozen=True, slots=True)
class Offer:
    """One backend of attn-select's order, as an engine has it.

    Attributes:
        backend: attn-select's name.
        name: the engine's; None where it has none.
        why: why it has none, or why the one that it has comes later; else empty.
        block_size: tokens per cache block that attn-select would give it; None for layers without a cache.
        place: in the order for this engine, least first.
    """

    backend: str
    name: EngineName | None
    why: str
    block_size: int | None
    place: float = 0


def engine_table(key: str) -> EngineTable:
    """Return what is known of the engine that ``--engine`` calls so."""
    data = tomllib.loads((Path(__file__).with_name(f"{key}.toml")).read_text("utf-8"))
    return EngineTable(
        key=key,
        engine=data["engine"],
        release=data["release"],
        command=tuple(data["command"]),
        adapter=data.get("adapter"),
        adapter_kernels={name: compile_when(when)[0] for name, when in data.get("adapter_kernels", {}).items()},
        mla_prefill=data.get("mla_prefill", "by phase"),
        splits_blocks=data.get("splits_blocks", False),
        arguments=data["arguments"],
        kinds=data.get("kinds", {}),
        kv_cache_dtypes=data.get("kv_cache_dtypes", {}),
        limits=tuple(data["limits"]),
        names=tuple(
            EngineName(
                backend=row["backend"],
                name=row["name"],
                argument=row.get("argument", "attention"),
                when=compile_when(row.get("when", {}))[0],
                kernels=tuple(row.get("kernels", ())),
                block_sizes=tuple(row.get("block_sizes", ())),
                arguments=row.get("arguments", {}),
                own_kernel=row.get("own_kernel", False),
                architectures=tuple(row.get("architectures", ())),
                fault=row.get("fault", ""),
                source=row["source"],
            )
            for row in data["names"]
        ),
        defaults=tuple(
            EngineDefault(
                name=row["name"],
                argument=row.get("argument", "attention"),
                when=compile_when(row.get("when", {}))[0],
                architectures=tuple(row.get("architectures", ())),
                arguments=row.get("arguments", {}),
                source=row["source"],
            )
            for row in data.get("defaults", ())
        ),
        own_defaults=tuple(data.get("own_defaults", ())),
        unserved=tuple(
            EngineKernel(
                kinds=tuple(row["kinds"]),
                name=row["name"],
                when=compile_when(row.get("when", {}))[0],
                default=row.get("default", True),
                source=row["source"],
            )
            for row in data.get("unserved", ())
        ),
        explicit_kv_cache=compile_when(data["explicit_kv_cache"])[0] if "explicit_kv_cache" in data else None,
        cache_is_dtype=data.get("cache_is_dtype", False),
        states_batch_invariant=data.get("states_batch_invariant", True),
        kv_heads_divided=tuple(data.get("kv_heads_divided", ())),
        accepts={tuple(row["architectures"]): tuple(row["names"]) for row in data.get("accepts", ())},
        refusals=tuple(
            EngineRefusal(
                when=compile_when(row["when"])[0],
                architectures=tuple(row.get("architectures", ())),
                why=row["why"],
                starts=row.get("starts", False),
                source=row["source"],
            )
            for row in data.get("refusals", ())
        ),
        lists_all=compile_when(data["lists_all"])[0] if "lists_all" in data else None,
        other_layers=tuple(
            OtherLayers(tuple(row["architectures"]), row["why"], row["source"]) for row in data.get("other_layers", ())
        ),
    )
