"""What tests of a plugin's facts need: layers, devices and environments to ask about, and the gate's answers.

from attn_select.testing import gqa_layer, plan_of, reasons_of

assert plan_of(ACME_ATTN, gqa_layer(), "h100").cuda_graph == "ALWAYS"
assert list(reasons_of(ACME_ATTN, gqa_layer(alibi=True), "h100")) == ["alibi"]
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from attn_select.backends.spec import BackendOptions, BackendPlan, BackendSpec, Fact, Library, Reason
from attn_select.decide import gate
from attn_select.decide.outcome import Candidate, Verdict
from attn_select.decide.selection import Selection
from attn_select.decide.shared_cache import shared_cache
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.layer.dtypes import is_quantized
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.layouts import MLA
from attn_select.machine.device import CPU, Device, lookup
from attn_select.machine.environment import (
    INSTALLED,
    MISSING,
    WRONG_VERSION,
    Environment,
    LibraryState,
    canonical_distribution,
    version_matches,
)

__tracebackhide__ = True  # a failure shows the test that asked, not the toolkit

Outcome = BackendPlan | list[Reason]
"""What the gate answers: a plan, or every reason against it."""
Outcomes = dict[Phase, Outcome]
"""Per phase that the layer has and the backend serves."""
_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

GQA_FIELDS: Mapping[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
"""Llama-3-8B's layer."""
MLA_FIELDS: Mapping[str, Any] = {
    "num_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""DeepSeek-V3's layer."""

Where = Device | str | tuple[int, int] | None
"""A device: itself, its name (``h100``), its compute capability, or None for a CPU."""


def gqa_layer(**fields: Any) -> AttentionConfig:
    """Return Llama-3-8B's layer with ``fields`` changed."""
    return AttentionConfig(**{**GQA_FIELDS, **fields})


def mla_layer(**fields: Any) -> AttentionConfig:
    """Return DeepSeek-V3's layer with ``fields`` changed."""
    return AttentionConfig(**{**MLA_FIELDS, **fields})


def device_of(where: Where) -> Device:
    """Return a device by itself, by name, by compute capability, or (None) the CPU."""
    if isinstance(where, tuple):
        return Device("sm{}{}".format(*where), where)
    if where is None:
        return CPU
    return lookup(where) if isinstance(where, str) else where


@dataclass(frozen=True, slots=True)
class StatedEnvironment(Environment):
    """An environment of stated libraries, which looks at nothing that this machine has."""

    # The installed distributions and their versions (None: no metadata says one); None: every library is assumed
    # installed.
    installed: Mapping[str, str | None] | None = None
    # Libraries that are not there in any case.
    missing: frozenset[Library] = frozenset()

    def __hash__(self) -> int:
        installed = None if self.installed is None else frozenset(self.installed.items())
        return hash((Environment.__hash__(self), installed, self.missing))

    def version(self, distribution: str) -> str | None:
        """Return the stated version of a distribution, None without one."""
        name = canonical_distribution(distribution)
        return self.pins.get(name) or (self.installed or {}).get(name)

    def state(self, library: Library) -> LibraryState:
        """Return how a library stands here."""
        if library in self.missing:
            return MISSING
        if self.installed is None:
            return Environment.state(self, library)
        name, version = canonical_distribution(library.distribution), self.version(library.distribution)
        if name not in self.installed and name not in self.pins:
            return MISSING
        if library.version and (version is None or not version_matches(version, library.version)):
            return WRONG_VERSION
        return INSTALLED


def environment_of(
    *,
    installed: Mapping[str, str | None] | None = None,
    pins: Mapping[str, str] | None = None,
    missing: Iterable[Library] = (),
    variables: Mapping[str, str] | None = None,
    cuda: str | None = None,
) -> Environment:
    """Return an environment that depends on nothing but the arguments.

    Args:
        installed: exactly these distributions are installed, by name and version; None: every library is assumed.
        pins: versions that are given, as by ``--with``.
        missing: libraries that are not there.
        variables: environment variables; none by default.
        cuda: the CUDA version.
    """
    return StatedEnvironment(
        assume_installed=installed is None,
        pins=pins or {},
        variables=variables or {},
        cuda=cuda,
        installed=None
        if installed is None
        else {canonical_distribution(name): version for name, version in installed.items()},
        missing=frozenset(missing),
    )


def ask(
    spec: BackendSpec,
    config: AttentionConfig,
    where: Where = "h100",
    phase: Phase = "decode",
    *,
    environment: Environment | None = None,
    options: Mapping[str, Any] | None = None,
    **stated: Any,
) -> Outcome:
    """Return what the gate says about one phase: a plan, or every reason against it.

    Args:
        where: the device, its name or its compute capability; None is the CPU.
        environment: the libraries and variables; left out: ``environment_of(**stated)``.
        options: the ``[backends.NAME]`` table.
        stated: arguments of ``environment_of``: ``installed``, ``pins``, ``missing``, ``variables``, ``cuda``.
    """
    given = _environment(environment, stated)
    return gate.check(spec, config, device_of(where), given, spec.options(**options or {}), phase)


def plan_of(spec: BackendSpec, config: AttentionConfig, *args: Any, **kwargs: Any) -> BackendPlan:
    """Return the plan of a configuration that is accepted; arguments as in ``ask``.

    Raises:
        AssertionError: it is rejected, with every reason's text.
    """
    outcome = ask(spec, config, *args, **kwargs)
    if isinstance(outcome, BackendPlan):
        return outcome
    raise AssertionError(f"{spec.name} rejects the layer: {'; '.join(_texts(outcome))}")


def reasons_of(spec: BackendSpec, config: AttentionConfig, *args: Any, **kwargs: Any) -> dict[str, Reason]:
    """Return the reasons against a configuration that is rejected, by code; arguments as in ``ask``.

    Raises:
        AssertionError: it is accepted, or two reasons have the same code.
    """
    outcome = ask(spec, config, *args, **kwargs)
    if isinstance(outcome, BackendPlan):
        raise AssertionError(f"{spec.name} accepts the layer: {outcome}")
    found = {reason.code: reason for reason in outcome}
    if len(found) < len(outcome):
        raise AssertionError(f"{spec.name} gives two reasons with the same code: {'; '.join(_texts(outcome))}")
    return found


def codes_of(spec: BackendSpec, config: AttentionConfig, *args: Any, **kwargs: Any) -> set[str]:
    """Return the codes of the reasons against a configuration, none where it is accepted; arguments as in ``ask``."""
    return codes(ask(spec, config, *args, **kwargs))


def outcomes(
    spec: BackendSpec, config: LayerConfig, device: Device, environment: Environment, options: BackendOptions
) -> Outcomes:
    """Ask the gate about every phase."""
    served = [phase for phase in config.phases if phase in spec.capabilities]
    return {phase: gate.check(spec, config, device, environment, options, phase) for phase in served}


def plans_of(found: Outcomes) -> dict[Phase, BackendPlan]:
    """Return the plans of the phases that are accepted."""
    return {phase: outcome for phase, outcome in found.items() if isinstance(outcome, BackendPlan)}


def codes(outcome: Outcome) -> set[str]:
    """Return the codes of the reasons, none of a plan."""
    return {reason.code for reason in outcome} if isinstance(outcome, list) else set()


def shared_layouts(plans: Mapping[Phase, BackendPlan]) -> list[str]:
    """Return the KV layouts that all plans with a cache read, preferred first."""
    readers = [plan.kv_layouts for plan in plans.values() if plan.kv_layouts]
    return [name for name in readers[0] if all(name in layouts for layouts in readers)] if readers else []


class EmulatedSelection(Selection[Any]):
    """A selection whose layers run on any device, whichever it was made for: its kernels are emulated there."""

    __slots__ = ()
    runs_anywhere = True

    @classmethod
    def of(cls, selection: Selection[Any]) -> EmulatedSelection:
        """Return a selection as one whose kernels are emulated."""
        return cls(**{field.name: getattr(selection, field.name) for field in dataclasses.fields(selection)})


def selection_for(
    spec: BackendSpec,
    plans: Mapping[Phase, BackendPlan],
    config: LayerConfig,
    device: Device,
    environment: Environment,
    options: BackendOptions,
    layout_choice: int = 0,
) -> Selection[Any] | None:
    """Return what ``select`` would return if ``spec`` were the only backend; None: the phases share no cache."""
    # ``layout_choice``: which of the KV layouts that all plans read, modulo their number; 0 is the preferred one.
    shared = shared_layouts(plans)
    layout = shared[layout_choice % len(shared)] if shared else None
    cache = shared_cache([*plans.values()], config.block_size, layout)
    if cache is None:
        return None
    if config.has_cache and not any(
        plan.kv_layouts for plan in plans.values()
    ):  # MLA prefill leaves the cache to whoever serves decode
        cache = MLA, config.block_size or 16
    verdicts: dict[Phase, Verdict] = {phase: Verdict(1, "selected", [], plan) for phase, plan in plans.items()}
    return EmulatedSelection(
        config=config,
        device=device,
        environment=environment,
        backends=dict.fromkeys(plans, spec),
        block_size=cache[1] if config.has_cache else None,
        kv_layout=cache[0] if config.has_cache else None,
        candidates=(Candidate(spec.name, verdicts),),
        rules=(),
        explicit={},
        warnings=(),
        options={spec.name: options},
    )


def selection_of(
    spec: BackendSpec,
    config: LayerConfig,
    where: Where = "h100",
    *,
    layout: str | None = None,
    phases: Sequence[Phase] | None = None,
    environment: Environment | None = None,
    options: Mapping[str, Any] | None = None,
    **stated: Any,
) -> Selection[Any]:
    """Return what ``select`` would return if ``spec`` were the only backend; arguments as in ``ask``, and:

    Args:
        layout: the KV layout; None is the preferred one.
        phases: those to select for; None: all that the layer has and the backend serves.

    Raises:
        AssertionError: a phase is rejected, or the phases share no cache, or no plan reads ``layout``.
    """
    device, given, made = device_of(where), _environment(environment, stated), spec.options(**options or {})
    found = outcomes(spec, config, device, given, made)
    if phases is not None:
        found = {phase: found[phase] for phase in phases}
    for phase, outcome in found.items():
        if isinstance(outcome, list):
            raise AssertionError(f"{spec.name} rejects {phase} of the layer: {'; '.join(_texts(outcome))}")
    plans, choice = plans_of(found), 0
    if layout is not None:
        layouts = shared_layouts(plans)
        assert layout in layouts, (
            f"layout = {layout!r}: the plans of {spec.name} read {', '.join(layouts) or 'no cache'}"
        )
        choice = layouts.index(layout)
    selection = selection_for(spec, plans, config, device, given, made, layout_choice=choice)
    assert selection is not None, f"{spec.name}: the phases share no cache: {plans}"
    return selection


def check_outcome(phase: Phase, plan: Outcome, config: AttentionConfig) -> None:
    """Hold reasons to their form, and a plan to what its fields mean, as far as the gate does not."""
    if isinstance(plan, list):
        for reason in plan:  # an error of the plugin is none
            stated = _CODE.fullmatch(reason.code) and reason.message and reason.code != "plugin-error"
            assert stated, f"{phase} is refused for no stated reason: {reason}"
        return
    queries = plan.query_dtype == config.dtype or is_quantized(plan.query_dtype)
    sound = {
        "path": (bool(plan.path), "a name"),
        "because": (bool(plan.because), "why it is this path"),
        "query_dtype": (queries, f"{config.dtype} or an FP8 dtype"),
        "rounds_to": (plan.rounds_to is None or is_quantized(plan.rounds_to), "None or an FP8 dtype"),
        "returns_lse": (isinstance(plan.returns_lse, bool), "True or False"),
        "kernel_block_sizes": (bool(plan.kv_layouts) == bool(plan.kernel_block_sizes), "some, if it has KV layouts"),
        "workspace_bytes": (plan.workspace_bytes >= 0, "integers from 0"),
        "block_table_width_multiple": (plan.block_table_width_multiple >= 1, "integers from 1"),
        "nan_tail_safe": (isinstance(plan.nan_tail_safe, bool), "True or False"),
    }
    for name, (right, accepted) in sound.items():
        assert right, f"{phase} by {plan.path}: {name} = {getattr(plan, name)!r} (accepted: {accepted})"


def check_answers(
    spec: BackendSpec,
    config: AttentionConfig,
    where: Where,
    *,
    environment: Environment | None = None,
    options: BackendOptions | None = None,
    **stated: Any,
) -> dict[Phase, Outcome]:
    """Ask a backend's plan function about every phase, hold the answers to their form, and return them.

    For property tests: whatever is asked, the answer is a usable plan or stated reasons. Arguments as in ``ask``, but
    ``options`` are made.

    Raises:
        AssertionError: an answer has the wrong form, or the gate's answer contradicts the plan function's.
    """
    device, given, made = device_of(where), _environment(environment, stated), options or spec.options()
    hash(spec.compile_key(config))
    found: dict[Phase, Outcome] = {}
    for phase in config.phases:
        if phase not in spec.capabilities:
            continue
        outcome = found[phase] = spec.plan(config, device, given, made, phase)
        judged = gate.check(spec, config, device, given, made, phase)
        if isinstance(outcome, list):
            assert outcome, "a plan function returns a plan or at least one reason"
            assert isinstance(judged, list), f"the gate accepts what the plan function refuses: {outcome}"
            check_outcome(phase, outcome, config)
        check_outcome(phase, judged, config)
    return found


def check_sources(spec: BackendSpec, *holders: Any, least: int = 1) -> None:
    """Hold every fact to its source: of all capabilities, and of further dataclasses with facts (providers, kernels).

    A fact whose source is a default's must be that default: what was looked up says where.

    Args:
        least: how many facts there are at least, so that a renamed field does not empty the check.

    Raises:
        AssertionError: names the backend and the field.
    """
    count = 0
    for holder in (*spec.capabilities.values(), *holders):
        for item in dataclasses.fields(holder):
            fact = getattr(holder, item.name)
            if not isinstance(fact, Fact):
                continue
            count += 1
            name = f"{spec.name}: {type(holder).__name__}.{item.name} = {fact.value!r}"
            assert fact.source.startswith("default") or len(fact.source) >= 10, f"{name} has the source {fact.source!r}"
            if fact.source.startswith("default"):
                assert fact is item.default, f"{name} is not the default, but gives it as its source"
    assert count >= least, f"{spec.name}: {count} facts were found, {least} were expected"


def with_other_texts(plan: BackendPlan) -> BackendPlan:
    """Return the plan with other words in its texts, which are for people and decide nothing: it runs what it ran."""
    return dataclasses.replace(
        plan, path=f"renamed {plan.path}", because="other", notes=("other",), provider="other (other)"
    )


_MADE_BACKENDS = "attn_select_made_backends"


def load_path_of(backend: type) -> str:
    """Return what ``BackendSpec.load`` says of a runtime class that a test has made."""
    module = sys.modules.setdefault(_MADE_BACKENDS, ModuleType(_MADE_BACKENDS))
    name = f"{backend.__name__}_{id(backend)}"
    setattr(module, name, backend)  # kept, so that the id stays its own
    return f"{_MADE_BACKENDS}:{name}"


@contextmanager
def emulated_modules(modules: Mapping[str, Mapping[str, Any] | ModuleType]) -> Iterator[dict[str, ModuleType]]:
    """Let ``import`` find these modules instead of the installed ones, until the block ends.

    Parents of a dotted name are made where ``modules`` does not give them, and know their child as an attribute.

    Args:
        modules: by name, the module or its attributes.

    Yields:
        The modules by name, made parents among them.
    """
    made: dict[str, ModuleType] = {}
    for name, given in modules.items():
        if isinstance(given, ModuleType):
            made[name] = given
        else:
            made[name] = ModuleType(name)
            vars(made[name]).update(given)
    for name in list(made):
        while "." in name:
            parent, _, child = name.rpartition(".")
            if parent not in made:
                made[parent] = ModuleType(parent)
                made[parent].__path__ = []
            setattr(made[parent], child, made[name])
            name = parent
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield made
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _environment(environment: Environment | None, stated: Mapping[str, Any]) -> Environment:
    if environment is not None and stated:
        raise TypeError(f"environment and {', '.join(stated)}: give one or the other")
    return environment_of(**stated) if environment is None else environment


def _texts(outcome: Iterable[Reason]) -> list[str]:
    return [f"{reason.code}: {reason.message}" for reason in outcome]
