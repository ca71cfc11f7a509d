"""What was decided for one attention layer, as data: the whole plan, and every candidate's verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Reason
from attn_select.decide.shared_cache import kernel_block_sizes
from attn_select.layer import layouts
from attn_select.layer.cache_format import CacheFormat, StateFormat
from attn_select.layer.config import Phase
from attn_select.layer.layer_config import ConfigT
from attn_select.layer.state import StateConfig
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.rules.rule import Rule

if TYPE_CHECKING:
    from attn_select.times.choice import EvidenceUsed, Timing
    from attn_select.times.ranks import RankCosts
    from attn_select.times.workload import Workload

VerdictName = Literal["selected", "valid", "rejected"]
LostBy = Literal["name", "times", "untimed", "rule", "unverified", "rank", "cache", "phases", "pair"]
"""What decided against a backend that could run:

- ``name``: the other one is asked for by name,
- ``times``: it is predicted to take longer; ``untimed``: nobody timed it on such layers, and times order the others,
- ``rule``: the order of a rule; ``rank``: the order in which backends stand where no rule names either of the two,
- ``unverified``: no source proves its plan, and the other one's is proved,
- although it stands before the chosen one, ``cache``: it shares no cache with the other phase's backend, ``phases``: a
  backend that serves both phases comes first, ``pair``: both phases together are predicted to take less with the other.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about one backend in one phase.

    Attributes:
        rank: position in the effective order, from 1; None where a backend is of another kind of attention and no
            priority lists it, or where an ``only`` rule shuts it out.
        verdict: ``selected``, ``valid`` (would run) or ``rejected``.
        reasons: everything that rejects it; empty unless rejected.
        plan: how it would run; None where rejected.
        timing: how long it takes for the workload's steps of the phase; None where nothing is known, or none was asked.
        relative_time: its time as a multiple of the chosen backend's; None where the two do not compare.
    """

    rank: int | None
    verdict: VerdictName
    reasons: list[Reason]
    plan: BackendPlan | None
    timing: Timing | None = None
    relative_time: float | None = None

    @property
    def order(self) -> float:
        """Sorts verdicts by rank; without one they come last."""
        return math.inf if self.rank is None else self.rank


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend with its verdict per phase of the layer."""

    backend: str
    phases: Mapping[Phase, Verdict]


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The first other backend that could run a phase.

    Attributes:
        backend: its name.
        lost_by: what decided against it.
        rule: the rule where one did, else None.
    """

    backend: str
    lost_by: LostBy
    rule: Rule | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; ``docs/json.md`` documents it."""
        return {"backend": self.backend, "lost_by": self.lost_by, "rule": None if self.rule is None else self.rule.name}


@dataclass(frozen=True, slots=True)
class Outcome(Generic[ConfigT]):
    """The decision for one attention layer: what runs, how, and why nothing else does.

    Attributes:
        config: what was asked for.
        device: the device it was decided for.
        environment: the libraries and variables it rests on.
        backends: the chosen spec per phase that the layer has; None where no backend is valid.
        block_size: tokens per cache block; None for layers without a cache.
        kv_layout: name from ``attn_select.layer.layouts``; None for layers without a cache.
        candidates: every known backend, the ranked ones first in order.
        rules: the rules that took part, in the order they were applied.
        explicit: the backend that was asked for by name, per phase; it alone was considered there.
        warnings: what a user should know, one sentence each.
        options: the ``[backends.NAME]`` table of every registered backend.
        workload: the batches that it was decided for, or None.
        evidence: what was taken from measured times; None without a workload.
        runners_up: per phase the first other backend that could run it, where there is one.
    """

    config: ConfigT
    device: Device
    environment: Environment
    backends: Mapping[Phase, BackendSpec | None]
    block_size: int | None
    kv_layout: str | None
    candidates: tuple[Candidate, ...]
    rules: tuple[Rule, ...]
    explicit: Mapping[Phase, str]
    warnings: tuple[str, ...]
    options: Mapping[str, BackendOptions]
    workload: Workload | None = None
    evidence: EvidenceUsed | None = None
    runners_up: Mapping[Phase, RunnerUp] = field(default_factory=dict)

    def verdict(self, backend: str, phase: Phase) -> Verdict:
        """Return the verdict on a known backend in a phase that the layer has."""
        return next(each.phases[phase] for each in self.candidates if each.backend == backend)

    @property
    def ok(self) -> bool:
        """Whether every phase of the layer has a backend."""
        return None not in self.backends.values()

    @property
    def selected(self) -> dict[Phase, str | None]:
        """Backend name (or None) for each phase that the layer has."""
        return {phase: spec.name if spec else None for phase, spec in self.backends.items()}

    def ranked(self, phases: Sequence[Phase]) -> list[Candidate]:
        """Return the candidates that are valid and ranked in all of these phases, the best first.

        One that is selected for all of them leads; then ranks decide, in the last phase before the first.
        """
        able: list[tuple[bool, int, int, Candidate]] = []
        for candidate in self.candidates:
            verdicts = [candidate.phases[phase] for phase in phases]
            ranks = [v.rank for v in verdicts if v.rank is not None and v.verdict != "rejected"]
            if len(ranks) == len(phases):
                chosen = all(v.verdict == "selected" for v in verdicts)
                able.append((not chosen, ranks[-1], ranks[0], candidate))
        return [candidate for *_, candidate in sorted(able, key=lambda found: found[:3])]

    @property
    def plans(self) -> dict[Phase, BackendPlan]:
        """The plan of each phase that has a backend."""
        phases = [each for candidate in self.candidates for each in candidate.phases.items()]
        found = {phase: v.plan for phase, v in phases if v.verdict == "selected" and v.plan is not None}
        return {phase: found[phase] for phase in self.backends if phase in found}

    def plans_by_backend(self, phases: Sequence[Phase] | None = None) -> dict[str, dict[Phase, BackendPlan]]:
        """Return per backend the plans of the phases that it was chosen for; ``phases`` leaves out others."""
        found: dict[str, dict[Phase, BackendPlan]] = {}
        plans = self.plans
        for phase, name in self.selected.items():
            if name is not None and (phases is None or phase in phases):
                found.setdefault(name, {})[phase] = plans[phase]
        return found

    @property
    def cache_format(self) -> CacheFormat | None:
        """What another side must share to exchange cache blocks with this one; None without keys and values.

        Raises:
            ConfigError: the kernels of the two phases share no block size.
        """
        config = self.config
        if self.kv_layout is None or self.block_size is None or isinstance(config, StateConfig):
            return None
        sizes = kernel_block_sizes(self.plans_by_backend(), self.block_size, self.kv_layout)
        return CacheFormat(config, self.kv_layout, self.block_size, max(sizes.values(), default=self.block_size))

    @property
    def state_format(self) -> StateFormat | None:
        """What another side must share to exchange states with this one; None for layers that keep none."""
        config = self.config
        return StateFormat(config, self.kv_layout) if isinstance(config, StateConfig) and self.kv_layout else None

    @property
    def cache_fingerprint(self) -> str | None:
        """The short stable id of ``cache_format`` or ``state_format``; None without either."""
        kept = self.cache_format or self.state_format
        return None if kept is None else kept.fingerprint

    @property
    def cache_shape(self) -> list[int | str] | None:
        """Shape in elements of one layer's cache, with ``"num_blocks"`` open, or of its states, with ``"num_slots"``
        open; None without a cache."""
        config = self.config
        if self.kv_layout is None:
            return None
        if isinstance(config, StateConfig):
            return layouts.state_shape(self.kv_layout, config)
        return None if self.block_size is None else layouts.cache_shape(self.kv_layout, config, self.block_size)

    @property
    def stored_dtype(self) -> str | None:
        """What the cache holds: ``fp8_ds_mla`` in that layout, else the dtype of the KV cache or of the states; None
        without a cache."""
        config = self.config
        if self.kv_layout is None:
            return None
        if isinstance(config, StateConfig):
            return config.state_dtype
        return "fp8_ds_mla" if self.kv_layout == layouts.FP8_DS_MLA else config.cache_dtype

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes that one token of one layer takes in the cache; None without a cache, and of states."""
        config = self.config
        if self.kv_layout is None or isinstance(config, StateConfig):
            return None
        return layouts.bytes_per_token(self.kv_layout, config)

    @property
    def bytes_per_request(self) -> int | None:
        """Bytes that one request of one layer takes, whatever its length: its states, one more for each draft, and what
        the convolution sees. None of layers that keep keys and values."""
        config = self.config
        return layouts.bytes_per_request(config) if isinstance(config, StateConfig) else None

    @property
    def rank_costs(self) -> RankCosts | None:
        """What context parallelism costs and saves; None for layers of one rank, or without a cache."""
        config = self.config
        if isinstance(config, StateConfig) or config.decode_context_parallel_size == 1:
            return None
        from attn_select.times.ranks import rank_costs  # few layers have ranks

        return rank_costs(config, self.device, self.bytes_per_token, self.workload)

    @property
    def indexer_bytes_per_token(self) -> int:
        """Bytes that one token of one layer takes in the cache of its indexer, in FP8; 0 where there is none."""
        return layouts.INDEXER_BYTES if self.config.sort == "sparse_mla" and self.kv_layout is not None else 0
