"""``select()``: gathers what a decision rests on, and decides."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from attn_select.backends.registry import load_plugins
from attn_select.decide.config_text import config_text
from attn_select.decide.decide import decide
from attn_select.decide.explicit import parse_choice
from attn_select.decide.selection import Selection
from attn_select.decide.shared_pool import agree_on_pool
from attn_select.decide.situation import Situation, situation_of
from attn_select.errors import ConfigError, show
from attn_select.layer.config import AttentionConfig
from attn_select.layer.layer_config import ConfigT
from attn_select.layer.state import StateConfig
from attn_select.machine import detection
from attn_select.machine.device import Device, lookup
from attn_select.machine.environment import Environment
from attn_select.rules.layers import RuleSet, load_rules

if TYPE_CHECKING:
    from attn_select.times.evidence import Evidence
    from attn_select.times.workload import Workload, WorkloadArgument

logger = logging.getLogger(__name__)

RulesArgument = RuleSet | str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
BackendArgument = str | Sequence[str] | Mapping[str, str] | None
TimesArgument = bool | str | os.PathLike[str]


def select(
    config: ConfigT,
    device: Device | str | None = None,
    rules: RulesArgument = None,
    backend: BackendArgument = None,
    *,
    environment: Environment | None = None,
    workload: WorkloadArgument | None = None,
    times: TimesArgument = True,
    host_time: bool = False,
) -> Selection[ConfigT]:
    """Pick the backend (or the prefill and decode pair) for one attention layer, with the reason for every candidate.

    Cached: equal arguments again cost about a microsecond. Rules files, plugins and the
    environment are read once per process; ``clear_cache()`` reads them again.

    Args:
        config: what the layer asks for: an ``AttentionConfig``, or a ``StateConfig`` of a layer that keeps a state.
        device: a ``Device``, a name (``h100``, ``sm90``, ``9.0``, ``cpu``) or None for this machine's own.
        rules: one more rules file or several, above all other layers; or a ``RuleSet`` that replaces them all.
        backend: an explicit choice, ``"FLASHMLA"``, ``"decode=FLASHMLA"``, ``{"decode": "FLASHMLA"}`` or a list of the
            former. It beats every rule, must pass the gate and is never replaced by another backend.
        environment: the libraries and variables to judge by, by value; None probes this machine, or for a device that
            is not this machine's assumes all libraries.
        workload: the batches that the layer is to be fast at, as ``attn_select.times.workload.parse_workload`` reads
            them: ``"64q1s4k*0.8,q2k*0.2"``, a profile such as ``"chat"``, or a file. Rules about batches match only
            with one; without one the default mix counts. A file is read once per process.
        times: whether the device's survey takes part: the user's own (``attn-select tune``) or the packaged one; or the
            file of another survey. Read once per process.
        host_time: whether a step takes at least the host time of an eager call, as where CUDA graphs are not used.

    Returns:
        A ``Selection``. Check ``ok``: where no backend is valid the phase's entry is None and the reasons are in
        ``candidates``; ``Selection.load()`` raises ``NoBackendError`` then.

    Raises:
        ConfigError, UnknownNameError: unknown device, backend or workload, malformed ``backend`` or ``workload``.
        RulesError: a rules file is missing or broken.
        MeasurementError: a survey's file cannot be read.
    """
    if not isinstance(config, (AttentionConfig, StateConfig)):
        text = f"config = {show(config)}: expected an AttentionConfig or a StateConfig"
        raise ConfigError(text, fields=["config"])
    arguments: Any = (config, _or_here(device), rules, backend, environment, workload, times, host_time)
    try:
        hash(arguments)
    except TypeError:  # lists, mappings and rule sets may change
        return _decided(*arguments)
    return _recent(*arguments)


def _decided(config: Any, *arguments: Any) -> Selection[Any]:
    return _decided_together((config,), *arguments)[0]


_recent = functools.lru_cache(maxsize=4096, typed=True)(_decided)  # an engine asks again for every layer


def select_model(
    configs: Sequence[ConfigT],
    device: Device | str | None = None,
    rules: RulesArgument = None,
    backend: BackendArgument = None,
    *,
    environment: Environment | None = None,
    workload: WorkloadArgument | None = None,
    times: TimesArgument = True,
    host_time: bool = False,
) -> tuple[Selection[ConfigT], ...]:
    """Select for all layer kinds of a model that share a cache pool: one KV layout and one block size for all of them.

    Kinds without a cache, kinds that keep a state, and MLA beside other attention are decided by themselves. A backend
    that is asked for by name counts for layers that keep keys and values, or for those that keep a state, whichever it
    is for. Where the kinds' best backends
    want different layouts or block sizes, the combination with the least time wins where times of all are known, else
    that with the least sum of ranks; where none fits all, each keeps its own and a warning says so. A block size that a
    config names is the pool's: a kind that cannot run with it has no backend, and its candidates say why. Arguments and
    errors as ``select`` has them.

    Raises:
        ConfigError: ``configs`` are none, or two of one pool name different block sizes.
    """
    given = tuple(configs) if isinstance(configs, Iterable) else (None,)
    if not all(isinstance(config, (AttentionConfig, StateConfig)) for config in given):
        text = f"configs = {show(configs)}: expected a sequence of AttentionConfig and StateConfig"
        raise ConfigError(text, fields=["configs"], hint="configs_from_model(model).configs is one")
    return _decided_together(given, device, rules, backend, environment, workload, times, host_time)


def _decided_together(
    configs: Sequence[Any],
    device: Device | str | None,
    rules: RulesArgument,
    backend: BackendArgument,
    environment: Environment | None,
    workload: WorkloadArgument | None,
    times: TimesArgument,
    host_time: bool,
) -> tuple[Selection[Any], ...]:
    situation = situation_for(device, rules, environment)
    choice = parse_choice(backend, situation.names, situation.registry.failed)
    batches, evidence = _workload(workload), _evidence_for(times, host_time, situation)

    both = len({config.sort == "state" for config in configs}) == 2

    def decide_one(config: Any, kv_layout: str | None = None) -> Selection[Any]:
        own_choice = choice.among(situation.candidates(config)) if both else choice
        return decide(situation, config, own_choice, kv_layout, batches, evidence)

    selections = agree_on_pool(configs, decide_one)
    for selection in selections:
        _log(selection)
    return selections


def _log(selection: Selection[Any]) -> None:
    """Log what was decided, at level INFO."""
    if not logger.isEnabledFor(logging.INFO):
        return
    for phase, name in selection.selected.items():
        verdicts = [candidate.phases[phase].verdict for candidate in selection.candidates]
        able = f"{len(verdicts) - verdicts.count('rejected')} of {len(verdicts)} backends can run it"
        used = selection.evidence
        by = "times" if used is not None and used.phases[phase].by_times else "rules"
        logger.info("%s: %s by %s, %s: %s", phase, name or "none", by, able, config_text(selection.config))


def _or_here(device: Any) -> Any:
    """Return a device, of this machine where None or auto asks for it. What is found is not kept: it may change."""
    # torch knows GPUs once it has started CUDA.
    return detection.detect_device().device if device is None or device == "auto" else device


def situation_for(device: Device | str | None, rules: RulesArgument, environment: Environment | None) -> Situation:
    """Return what decisions rest on for a device, rules and environment, as ``select`` takes them.

    Cached, unless the rules are a ``RuleSet``.
    """
    if device is not None and not isinstance(device, (str, Device)):
        text = f"device = {show(device)}: expected a Device, a name such as 'h100', or None for this machine's"
        raise ConfigError(text, fields=["device"])
    device = _or_here(device)
    found = lookup(device) if isinstance(device, str) else device
    libraries = environment if environment is not None else environment_for(found)
    if not isinstance(libraries, Environment):
        raise ConfigError(f"environment = {show(libraries)}: expected an Environment, or None", fields=["environment"])
    if isinstance(rules, RuleSet):  # which may change
        return situation_of(load_plugins(), rules, found, libraries)
    several = isinstance(rules, Sequence) and not isinstance(rules, str)
    given: Any = () if rules is None else rules if several else (rules,)
    if not all(isinstance(path, (str, os.PathLike)) for path in given):
        text = f"rules = {show(rules)}: expected the path of a rules file, several, or a RuleSet"
        raise ConfigError(text, fields=["rules"])
    return _situation(found, tuple(os.fspath(path) for path in given), libraries)


@functools.lru_cache(maxsize=128)
def _situation(device: Device, rules: tuple[str, ...], environment: Environment) -> Situation:
    libraries = "all libraries assumed" if environment.assume_installed else "libraries of this machine"
    given = [f"{name}={value}" for name, value in {**environment.pins, **environment.variables}.items()]
    logger.info("device: %s", ", ".join([device.full_name or device.name, libraries, *given]))
    return situation_of(load_plugins(), _rules(rules), device, environment)


def environment_for(device: Device, pins: Mapping[str, str] | None = None) -> Environment:
    """Return the environment that goes with a device: probed on this machine's own, else assumed. Cached.

    ``pins`` are the versions of ``--with`` by canonical distribution name; ``cuda`` among them is CUDA's.
    """
    return _environment(device, tuple(sorted((pins or {}).items())))


@functools.lru_cache(maxsize=128)
def _environment(device: Device, pins: tuple[tuple[str, str], ...]) -> Environment:
    given = dict(pins)
    cuda = given.get("cuda")
    if cuda is None and device.local and not device.is_cpu:
        cuda = detection.detect_device().cuda_driver_version
    variables = {name: os.environ[name] for name in load_plugins().variables if name in os.environ}
    return Environment(assume_installed=not device.local, pins=given, variables=variables, cuda=cuda)


@functools.lru_cache(maxsize=16)
def _rules(paths: tuple[str, ...], working_directory: bool = True) -> RuleSet:
    return load_rules(paths, working_directory=working_directory)


def rules_in_an_engine() -> RuleSet:
    """Return the rules of a process that an engine owns: without the working directory's rules, unless they are named.

    An engine is started anywhere. Cached as rules are for ``select``, whose argument ``rules`` takes them.

    Raises:
        RulesError: a rules file is missing or broken.
    """
    return _rules((), working_directory=False)


def _workload(workload: WorkloadArgument | None) -> Workload | None:
    """Return the workload that is asked for. A file is read once."""
    if workload is None or isinstance(workload, (str, PurePath)):
        return None if workload is None else _read_workload(workload)
    from attn_select.times.workload import parse_workload  # most ask for no workload

    return parse_workload(workload)


@functools.lru_cache(maxsize=256)
def _read_workload(given: str | PurePath) -> Workload:
    from attn_select.times.workload import parse_workload

    return parse_workload(given)


def _evidence_for(times: TimesArgument, host_time: bool, situation: Situation) -> Evidence | None:
    """Return what is known about times on the device, unless rules alone are to decide."""
    if times is False or situation.device.is_cpu:
        return None
    if times is not True and not isinstance(times, (str, os.PathLike)):
        text = f"times = {show(times)}: expected True, False, or the path of a survey's file"
        raise ConfigError(text, fields=["times"])
    path = None if times is True else os.fspath(times)
    return _evidence(situation.device, situation.environment, path, host_time)


@functools.lru_cache(maxsize=128)
def _evidence(device: Device, environment: Environment, path: str | None, host_time: bool) -> Evidence | None:
    from attn_select.times.evidence import load_evidence  # few devices were surveyed

    found = load_evidence(device, environment, load_plugins().specs, None if path is None else Path(path), host_time)
    if found is None:
        logger.info("times: no survey of %s", device.full_name or device.name)
    else:
        of = found.survey
        logger.info("times: survey of %s (%s), %s workloads, %s", of.gpu, of.source, of.workloads, of.date)
    return found


def clear_cache() -> None:
    """Forget every selection, and read plugins, rules files, the device and the environment again at the next call."""
    detection.by_nvml.cache_clear()
    for read in (_recent, load_plugins, _situation, _environment, _rules, _read_workload, _evidence):
        read.cache_clear()
    if (prediction := sys.modules.get("attn_select.times.prediction")) is not None:
        prediction.read_survey_file.cache_clear()
