"""The decision: every candidate through the gate, ranked, then one backend or a compatible pair."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import TYPE_CHECKING, NamedTuple

from attn_select.backends import distributions
from attn_select.backends.reasons import library_reasons
from attn_select.backends.registry import Plugin, Registry
from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Reason
from attn_select.decide import gate
from attn_select.decide.outcome import Candidate, Verdict
from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError, UnknownNameError, shorten, show
from attn_select.layer.config import PHASES, AttentionConfig, Phase
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.rules.layers import RuleSet
from attn_select.rules.libraries import import_names
from attn_select.rules.lint import known_names, rule_warnings
from attn_select.rules.options import read_options
from attn_select.rules.ranking import Ranker, Rankings, unknown_versions
from attn_select.rules.rule import Rule

if TYPE_CHECKING:
    from attn_select.times.choice import ByTimes, EvidenceUsed
    from attn_select.times.evidence import Evidence
    from attn_select.times.workload import Workload

_NO_REASONS: list[Reason] = []
_Cache = tuple[str | None, int | None]
"""KV layout and block size (tokens)."""
_Plans = dict[Phase, dict[str, BackendPlan]]
_MOST_TYPES = 1024
"""Of how many types of layers (``gate.Demands.types``) is kept what backends say of them."""
_MOST_REFUSALS = 8192
"""How many verdicts on backends that run no layer of some types are kept."""


@dataclass(frozen=True, slots=True)
class Choice:
    """An explicit choice of backends.

    ``default`` applies to the phases that the backend serves, the others to one phase.
    """

    default: str | None = None
    prefill: str | None = None
    decode: str | None = None

    def for_phase(self, phase: Phase) -> str | None:
        """Return the backend named for exactly this phase, or None."""
        return self.prefill if phase == "prefill" else self.decode

    def __bool__(self) -> bool:
        return not (self.default is self.prefill is self.decode is None)


def parse_choice(
    backend: str | Sequence[str] | Mapping[str, str] | None, known: Sequence[str], failed: Sequence[Plugin] = ()
) -> Choice:
    """Read ``NAME``, ``PHASE=NAME``, a list of them or a mapping.

    ``failed`` are the plugins that did not load: nobody knows the names of their backends.

    Raises:
        UnknownNameError: a backend or phase name that is not known.
        ConfigError: two choices for one phase.
    """
    if backend is None:
        return Choice()
    if isinstance(backend, Mapping):
        items: list[tuple[str, str]] = list(backend.items())
    else:
        texts = [backend] if isinstance(backend, str) or not isinstance(backend, Sequence) else backend
        items = [_split_choice(text) for text in texts]
    chosen: dict[str, str] = {}
    for phase, name in items:
        if phase and phase not in PHASES:
            raise UnknownNameError(
                "phase", phase, PHASES, hint=f"write NAME or PHASE=NAME with PHASE {' or '.join(PHASES)}"
            )
        spelled = name.strip().upper().replace("-", "_")
        if spelled not in known:
            broken = "; ".join(f"{plugin} is broken: {plugin.error}" for plugin in failed)
            note = f"it may be a backend of a plugin that did not load: {broken}" if failed else None
            raise UnknownNameError("backend", name, known, note=note)
        if chosen.get(phase, spelled) != spelled:
            where = phase or "all phases"
            raise ConfigError(
                f"backend for {where} is given twice: {chosen[phase]} and {shorten(spelled)}", fields=["backend"]
            )
        chosen[phase] = spelled
    return Choice(chosen.get(""), chosen.get("prefill"), chosen.get("decode"))


def _split_choice(text: object) -> tuple[str, str]:
    """Split ``NAME`` or ``PHASE=NAME``; no phase is the empty string."""
    if not isinstance(text, str) or text.startswith("=") or text.endswith("="):
        raise ConfigError(f"backend = {show(text)}: expected NAME or PHASE=NAME", fields=["backend"])
    phase, equals, name = text.partition("=")
    return (phase, name) if equals else ("", text)


class _Part(NamedTuple):
    """What a backend says of layers of some types (``gate.Demands.types``) in phases that share one gate.

    Attributes:
        gate: compares the layers with the capabilities; None where the phases are not served.
        against: what speaks against all layers of these types.
        fits: whether the backend serves their kind of attention, so that its ``plan`` is asked.
        phases: the phases.
    """

    gate: gate.CapabilityGate | None
    against: list[Reason]
    fits: bool
    phases: list[Phase]


_Asked = tuple[BackendSpec, BackendOptions, list[_Part]]
"""A backend that may run layers of some types."""


class _Judged:
    """One registered backend, made ready for the gate: what does not depend on the config is worked out once."""

    __slots__ = ("_gates", "options", "spec")

    def __init__(self, spec: BackendSpec, options: BackendOptions, device: Device, environment: Environment) -> None:
        self.spec, self.options = spec, options
        missing = library_reasons(spec, environment)
        made: dict[int, gate.CapabilityGate] = {}
        self._gates: dict[Phase, gate.CapabilityGate] = {}
        for phase, capabilities in spec.capabilities.items():
            if id(capabilities) not in made:
                made[id(capabilities)] = gate.CapabilityGate(capabilities, device, missing)
            self._gates[phase] = made[id(capabilities)]

    def parts(self, demands: gate.Demands) -> list[_Part]:
        """Return what there is to say of layers of these types, capabilities that phases share once."""
        found: dict[gate.CapabilityGate | None, _Part] = {}
        for phase in demands.config.phases:
            served = self._gates.get(phase)
            if served not in found:
                if served is None:
                    found[None] = _Part(None, [gate.phase_not_served(self.spec, phase)], False, [])
                else:
                    found[served] = _Part(served, served.of_types(demands), served.kind == demands.kind, [])
            found[served].phases.append(phase)
        return [*found.values()]


class _Refused:
    """A backend that runs no layer of some types, for what it says of each.

    Attributes:
        name: the backend's name.
        looks_at: the bits of the features that it may have something to say about.
    """

    __slots__ = ("_candidate", "_parts", "looks_at", "name")

    def __init__(self, name: str, parts: Sequence[_Part], phases: Sequence[Phase]) -> None:
        self.name = name
        said = {phase: part.against for part in parts for phase in part.phases}
        self._candidate = Candidate(name, {phase: Verdict(None, "rejected", said[phase], None) for phase in phases})
        self._parts = [(part.gate, part.against, part.phases) for part in parts if part.gate is not None]
        self.looks_at = functools.reduce(operator.or_, [each.refusing for each, _, _ in self._parts], 0)

    def candidate(self, demands: gate.Demands) -> Candidate:
        """Return the candidate for a layer, with everything that speaks against it. No rule ranks it."""
        verdicts = self._candidate.phases
        for capability_gate, against, phases in self._parts:
            reasons = capability_gate.compare(against, demands, False)
            if reasons is not against:
                verdicts = {**verdicts, **dict.fromkeys(phases, Verdict(None, "rejected", reasons, None))}
        return self._candidate if verdicts is self._candidate.phases else Candidate(self.name, verdicts)


_NO_RANKS: dict[Phase, int | None] = dict.fromkeys(PHASES)


class Decider:
    """Everything that one device, environment and rule set fix, compiled; ``decide`` does the rest per config.

    Attributes:
        names: every known backend: registered, doubly registered, and known but not installed.
    """

    def __init__(self, registry: Registry, rules: RuleSet, device: Device, environment: Environment) -> None:
        self.registry, self.rules, self.device, self.environment = registry, rules, device, environment
        self._specs: dict[str, BackendSpec] = dict(registry.specs)
        self._absent = {name: [reason] for name, reason in absent_backends(registry).items()}
        self.names = known_names(registry)
        self._options = read_options(rules, self._specs)
        self._judged = [_Judged(spec, self._options[name], device, environment) for name, spec in self._specs.items()]
        self._by_types: dict[tuple[object, ...], tuple[list[_Refused], list[_Asked]]] = {}
        self._refusals: dict[tuple[_Refused, object, object], Candidate] = {}
        candidates = [*self._specs, *self._absent]
        modules = import_names(self._specs)
        self._ranker = Ranker(rules.rules, device, environment, list(self._specs), modules, candidates)
        unknown = unknown_versions(rules.rules, device, environment, modules)
        self._warnings = [*registry.warnings, *rule_warnings(rules, self.names), *unknown]

    def decide(
        self,
        config: AttentionConfig,
        choice: Choice,
        kv_layout: str | None = None,
        workload: Workload | None = None,
        evidence: Evidence | None = None,
    ) -> Selection:
        """Decide for one layer.

        Args:
            config: what the layer asks for.
            choice: the backends that are asked for by name.
            kv_layout: that of a shared pool: only plans that read it count.
            workload: the batches to be fast at.
            evidence: what is known about times on this device; it counts with a workload alone.
        """
        phases = config.phases
        warnings = list(self._warnings)
        if workload is None:
            rankings = self._ranker.rank(config, phases)
        else:
            rankings = self._ranker.rank_for(config, phases, workload)
        forced = self._forced(choice, phases, rankings, warnings)
        candidates, plans = self._judge(config, rankings)
        if kv_layout is not None or rankings.denies:
            self._restrict(candidates, plans, rankings, forced, kv_layout)
        valid: dict[Phase, list[str]] = {}
        for phase, runs in plans.items():
            unverified = [name for name, plan in runs.items() if plan.unverified]
            if 0 < len(unverified) < len(runs):
                rankings = rankings.with_behind(phase, unverified)
                for name, rank in rankings[phase].ranks.items():
                    if candidates[name].phases[phase].rank != rank:
                        candidates[name] = candidates[name].with_verdict(phase, rank=rank)
            names: Iterable[str] = rankings[phase].ranks
            if phase in forced:
                names = [forced[phase]]
            elif not rankings[phase].by_rule:
                warnings.append(
                    f"no priority rule matches this layer in {phase}: backends are taken in the order registered"
                )
            valid[phase] = [*filter(runs.__contains__, names)]
        chosen, cache = self._choose(config, rankings, valid, plans, forced, kv_layout, warnings)
        used: EvidenceUsed | None = None
        if workload is not None and evidence is not None:
            found = self._by_times(config, workload, evidence, rankings, plans, forced, chosen, kv_layout, candidates)
            rankings, used = found.rankings, found.used
            if found.chosen != chosen:
                chosen = found.chosen
                cache = shared_cache(_decode_first(plans, chosen), config.block_size, kv_layout)
            warnings += evidence.warnings
        for phase, winner in chosen.items():
            if winner is not None:
                candidates[winner].phases[phase].verdict = "selected"
        layout, block_size = cache or (None, None)
        return Selection(
            config=config,
            device=self.device,
            environment=self.environment,
            backends={phase: None if name is None else self._specs[name] for phase, name in chosen.items()},
            block_size=block_size,
            kv_layout=layout,
            candidates=tuple(map(candidates.__getitem__, rankings.listed)),
            explicit=forced,
            rules=rankings.rules,
            warnings=tuple(warnings),
            options=self._options,
            workload=workload,
            evidence=used,
        )

    def _by_times(
        self,
        config: AttentionConfig,
        workload: Workload,
        evidence: Evidence,
        rankings: Rankings,
        plans: _Plans,
        forced: Mapping[Phase, str],
        chosen: Mapping[Phase, str | None],
        kv_layout: str | None,
        candidates: dict[str, Candidate],
    ) -> ByTimes:
        """Let times change what the rules chose; write ranks and times into the candidates."""
        from attn_select.times.choice import choose_by_times  # most ask for no workload

        def fits(pair: Mapping[Phase, str]) -> bool:
            return shared_cache(_decode_first(plans, pair), config.block_size, kv_layout) is not None

        found = choose_by_times(config, workload, evidence, rankings, self._specs, plans, forced, chosen, fits)
        for phase, ranking in found.rankings.items():
            shown = found.shown[phase]
            for name in {**ranking.ranks, **shown}:
                timing, behind = shown.get(name, (None, None))
                changes = {"rank": ranking.ranks.get(name), "timing": timing, "behind": behind}
                candidates[name] = candidates[name].with_verdict(phase, **changes)
        return found

    def _judge(self, config: AttentionConfig, rankings: Rankings) -> tuple[dict[str, Candidate], _Plans]:
        """Put every known backend through the gate: the verdicts on it, and per phase the plans of those that run.

        What speaks against the types of a layer is kept: few layers differ in them.
        """
        demands, ranks_of = gate.Demands(config), rankings.ranks_of
        refused, asked = self._by_types.get(demands.types) or self._rows(demands)
        candidates = self._refused(refused, demands, ranks_of)
        plans: _Plans = {phase: {} for phase in rankings}
        device, environment = self.device, self.environment
        for spec, options, parts in asked:
            name = spec.name
            ranks = ranks_of.get(name, _NO_RANKS)
            planned: BackendPlan | list[Reason] | None = None
            verdicts: dict[Phase, Verdict] = {}
            for capability_gate, against, fits, phases in parts:
                static = against if capability_gate is None else capability_gate.compare(against, demands, fits)
                for phase in phases:
                    outcome: BackendPlan | list[Reason] = static
                    if fits and capability_gate is not None:
                        if planned is None or not spec.phases_share_plan:
                            planned = gate.planned(spec, demands, device, environment, options, phase)
                        outcome = gate.judge(spec, capability_gate, demands, phase, planned, static)
                    if type(outcome) is BackendPlan:
                        plans[phase][name] = outcome
                        verdicts[phase] = Verdict(ranks[phase], "valid", _NO_REASONS, outcome)
                    else:
                        verdicts[phase] = Verdict(ranks[phase], "rejected", outcome, None)
            candidates[name] = Candidate(name, verdicts)
        return candidates, plans

    def _refused(
        self, rows: Sequence[_Refused], demands: gate.Demands, ranks_of: Mapping[str, Mapping[Phase, int | None]]
    ) -> dict[str, Candidate]:
        """Return the candidates that run no layer of these types, with everything that speaks against them.

        What one of them says is kept: most layers ask for little that it looks at.
        """
        wanted, sizes, kept = demands.wanted, demands.other_sizes, self._refusals
        candidates: dict[str, Candidate] = {}
        for row in rows:
            name, key = row.name, (row, wanted.among[row.looks_at], sizes)
            candidate = kept.get(key)
            if candidate is None:
                if len(kept) >= _MOST_REFUSALS:
                    kept.clear()
                candidate = kept[key] = row.candidate(demands)
            if ranks := ranks_of.get(name):
                verdicts = candidate.phases.items()
                ranked = {p: Verdict(ranks[p], "rejected", verdict.reasons, None) for p, verdict in verdicts}
                candidate = Candidate(name, ranked)
            candidates[name] = candidate
        return candidates

    def _restrict(
        self,
        candidates: dict[str, Candidate],
        plans: _Plans,
        rankings: Rankings,
        forced: Mapping[Phase, str],
        kv_layout: str | None,
    ) -> None:
        """Reject what cannot read the pool's layout, then what a rule denies."""

        def reject(name: str, phase: Phase, reasons: list[Reason]) -> None:
            plans[phase].pop(name, None)
            candidates[name] = candidates[name].with_verdict(phase, verdict="rejected", reasons=reasons, plan=None)

        for phase, runs in plans.items():
            for name, plan in [*runs.items()]:
                if kv_layout is not None and kv_layout not in (plan.kv_layouts or (kv_layout,)):
                    reject(name, phase, [_other_layout(plan, kv_layout)])
            for name, rule in rankings[phase].denied.items():
                if name in self._specs and forced.get(phase) != name:
                    reject(name, phase, [_denied(name, rule), *candidates[name].phases[phase].reasons])

    def _rows(self, demands: gate.Demands) -> tuple[list[_Refused], list[_Asked]]:
        """Return the known backends that run no layer of these types, and those that may. Kept for the next of them."""
        if len(self._by_types) >= _MOST_TYPES:
            self._by_types.clear()
        phases = demands.config.phases
        refused = [_Refused(name, [_Part(None, said, False, [*phases])], phases) for name, said in self._absent.items()]
        asked: list[_Asked] = []
        for judged in self._judged:
            parts = judged.parts(demands)
            if any(part.fits for part in parts):
                asked.append((judged.spec, judged.options, parts))
            else:
                refused.append(_Refused(judged.spec.name, parts, phases))
        self._by_types[demands.types] = refused, asked
        return refused, asked

    def _forced(
        self, choice: Choice, phases: Sequence[Phase], rankings: Rankings, warnings: list[str]
    ) -> dict[Phase, str]:
        """Return the explicitly chosen backend per phase of this layer."""
        forced: dict[Phase, str] = {}
        if not choice:
            return forced
        for phase in PHASES:
            name = choice.for_phase(phase)
            if phase not in phases:
                if name is not None:
                    warnings.append(f"backend {phase}={name} has no effect: this layer has no {phase}")
                continue
            if name is None and choice.default is not None:
                spec = self._specs.get(choice.default)
                # A backend that serves none of the layer's phases is forced on all of them, to be rejected with its
                # reason.
                served = [p for p in phases if p in spec.capabilities] if spec else []
                name = choice.default if phase in (served or phases) else None
            if name is None:
                continue
            forced[phase] = name
            denial = rankings[phase].denied.get(name)
            if denial is not None:
                warnings.append(
                    f"{name} is chosen explicitly for {phase} although rule {denial.name!r} ({denial.origin}) denies it"
                )
        return forced

    def _choose(
        self,
        config: AttentionConfig,
        rankings: Rankings,
        valid: Mapping[Phase, list[str]],
        plans: _Plans,
        forced: Mapping[Phase, str],
        kv_layout: str | None,
        warnings: list[str],
    ) -> tuple[dict[Phase, str | None], _Cache | None]:
        """Return one backend per phase: the first for all, else the compatible pair of lowest ranks, decode first.

        Beside it the KV layout and block size that they share.
        """
        if len(rankings) == 1 or not (valid["prefill"] and valid["decode"]):
            chosen = {phase: names[0] if names else None for phase, names in valid.items()}
            found = [plans[phase][name] for phase, name in chosen.items() if name is not None]
            return chosen, shared_cache(found, config.block_size, kv_layout) if config.has_cache else None
        both = () if rankings.by_phase or forced else [name for name in valid["decode"] if name in plans["prefill"]]
        for decode, prefill in chain(zip(both, both, strict=True), product(valid["decode"], valid["prefill"])):
            pair = [plans["decode"][decode], plans["prefill"][prefill]]
            cache = shared_cache(pair, config.block_size, kv_layout)
            if cache is not None:
                return {"prefill": prefill, "decode": decode}, cache
        warnings.append(
            f"no pair of backends shares a KV layout and block size: prefill could use {', '.join(valid['prefill'])}, "
            f"decode {', '.join(valid['decode'])}"
        )
        return {"prefill": None, "decode": None}, shared_cache([], config.block_size, kv_layout)


def _decode_first(plans: _Plans, chosen: Mapping[Phase, str | None]) -> list[BackendPlan]:
    """Return the plans of the chosen backends in the order in which their preferences count."""
    return [plans[phase][name] for phase in reversed(PHASES) if (name := chosen.get(phase)) is not None]


def shared_cache(plans: Sequence[BackendPlan], block_size: int | None, kv_layout: str | None = None) -> _Cache | None:
    """Return the KV layout and block size (tokens) that all ``plans`` can read, by the first plan's preference.

    Plans without layouts read no cache and do not count; with no other, both are None. ``block_size`` fixes the
    allocator's size; otherwise it is the first preferred kernel block size that all can split, else the least common
    multiple of their first choices. ``kv_layout`` fixes the layout to a pool's. None: no common ground.
    """
    readers = tuple([(plan.kv_layouts, plan.kernel_block_sizes) for plan in plans if plan.kv_layouts])
    return _common_ground(readers, block_size, kv_layout) if readers else (None, None)


@functools.lru_cache(maxsize=1024)
def _common_ground(
    readers: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...], block_size: int | None, kv_layout: str | None
) -> _Cache | None:
    """Return ``shared_cache`` for plans of these KV layouts and kernel block sizes, at least one."""
    layouts, sizes = readers[0]
    wanted = layouts if kv_layout is None else (kv_layout,)
    common = [name for name in wanted if all(name in accepted for accepted, _ in readers)]
    if not common:
        return None
    for size in sizes if block_size is None else (block_size,):
        if all(any(size % kernel == 0 for kernel in kernels) for _, kernels in readers):
            return common[0], size
    if block_size is not None:
        return None
    return common[0], math.lcm(*(kernels[0] for _, kernels in readers))


def _other_layout(plan: BackendPlan, kv_layout: str) -> Reason:
    """Return the reason against a plan that does not read the layout of the pool."""
    text = f"the shared pool has KV layout {kv_layout} (supported: {', '.join(plan.kv_layouts)})"
    return Reason("kv-layout", text, kv_layout, list(plan.kv_layouts))


def absent_backends(registry: Registry) -> dict[str, Reason]:
    """Return why each backend that is known by name and cannot be asked is absent, with the remedy if there is one."""
    absent: dict[str, Reason] = {}
    for name, owners in registry.conflicts.items():
        text = f"registered by {' and by '.join(owners)}"
        absent[name] = Reason("duplicate-backend", text, list(owners), "one owner", f"pip uninstall {owners[-1]}")
    failed = {plugin.distribution: plugin for plugin in registry.failed}
    for name, distribution in distributions.known_backends().items():
        if name in registry.specs or name in absent:
            continue
        if plugin := failed.get(distribution):
            absent[name] = Reason("plugin-broken", f"{plugin} is broken: {plugin.error}", plugin.error)
        else:
            command = distributions.install_command(distribution)
            absent[name] = Reason(
                "plugin-not-installed", f"plugin {distribution} is not installed", None, distribution, command
            )
    return absent


def _denied(name: str, rule: Rule) -> Reason:
    because = f": {rule.because}" if rule.because else ""
    return Reason(
        gate.DENIED, f"denied by rule {rule.name!r} ({rule.origin}){because}", rule.name, None, f"--backend {name}"
    )
