"""The explanation of a decision: the selections of all layer kinds of a model on one device, as text and as JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from attn_select.decide.lines import HANG, Line, byte_text, plain
from attn_select.decide.selection import Selection
from attn_select.decide.selector import environment_for, select_model, situation_for
from attn_select.decide.situation import Situation
from attn_select.decide.state_page import state_page
from attn_select.decide.text import brief_lines, device_lines, layer_lines, note_lines, plugin_lines, situation_lines
from attn_select.errors import ConfigError, ModelError, UnknownModelTypeError, UnknownNameError, shorten
from attn_select.layer.config import AttentionConfig
from attn_select.layer.models import LayerKind, LayerKinds, ModelSource, layer_kinds, load
from attn_select.layer.models.unserved import UnservedLayers
from attn_select.machine.detection import detect_device
from attn_select.machine.device import Device, lookup
from attn_select.machine.environment import canonical_distribution, parse_pins
from attn_select.rules.layers import RuleSet
from attn_select_cli.layer_options import flag_of, overrides_from

if TYPE_CHECKING:
    from attn_select.engines.answers import EngineAnswers
    from attn_select.engines.names import EngineTable

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
OTHERS = " others serve "
"""In the line about backends of other kinds of layers, which a model with several kinds needs once."""


@dataclass(slots=True)
class LayerExplanation:
    """One layer kind, which layers are of it and own a cache, and the decision."""

    layers: LayerKind
    selection: Selection[Any]

    @property
    def kind(self) -> str:
        """Its name."""
        return self.layers.kind

    @property
    def count(self) -> int:
        """How many layers are of it."""
        return self.layers.count

    @property
    def cache_count(self) -> int:
        """How many of them have a KV cache of their own."""
        return self.layers.owners.caches if self.selection.config.has_cache else 0

    def to_dict(self) -> dict[str, Any]:
        """Return its part of the JSON document."""
        owners = self.layers.owners
        return {
            "kind": self.kind,
            "count": self.count,
            "cache_count": self.cache_count,
            "indexer_count": owners.indexers,
            "kv_sources": {str(layer): source for layer, source in owners.kv_sources.items()},
            **self.selection.to_dict(),
        }


@dataclass(slots=True)
class Explanation:
    """Everything that ``attn-select explain`` says."""

    model: dict[str, Any] | None  # ``{"name", "architecture", "source"}`` or None where the layer was given by flags
    layers: Sequence[LayerExplanation]
    warnings: Sequence[str]  # about the model and the device; ``all_warnings`` adds the selections'
    situation: Situation  # what the decisions rest on
    unserved: Sequence[UnservedLayers] = ()  # layers of kinds that no backend here has a kernel for
    unused: Sequence[str] = ()  # the fields that options set and no layer has
    engine: EngineTable | None = None  # the engine whose own backends are asked too

    def answers(self, layer: LayerExplanation) -> EngineAnswers | None:
        """Return what the engine says of a kind of layers; None without one, and of layers that keep a state."""
        config = layer.selection.config
        if self.engine is None or not isinstance(config, AttentionConfig):
            return None
        from attn_select.engines.answers import answers

        return answers(self.engine, config, self.device, self.model["architecture"] if self.model else "")

    @property
    def attention(self) -> list[LayerExplanation]:
        """The kinds of layers with attention: engines choose their kernels apart from the kernels of states."""
        return [layer for layer in self.layers if layer.selection.config.sort != "state"]

    @property
    def ok(self) -> bool:
        """Whether every layer has a backend in every phase."""
        return not self.unserved and all(layer.selection.ok for layer in self.layers)

    @property
    def device(self) -> Device:
        """The device that was asked about."""
        return self.situation.device

    @property
    def all_warnings(self) -> list[str]:
        """All warnings, each once. Where there are several layer kinds, a warning about one names it."""
        seen = dict.fromkeys(self.warnings)
        for layer in self.layers:
            for warning in layer.selection.warnings:
                everywhere = all(warning in other.selection.warnings for other in self.layers)
                seen[warning if everywhere else f"{layer.kind}: {warning}"] = None
        return list(seen)

    def head_lines(self) -> list[Line]:
        """Return the lines that say which model and device the explanation is about."""
        lines: list[Line] = []
        if self.model is not None:
            architecture = f" ({self.model['architecture']})" if self.model["architecture"] else ""
            lines.append([("Model      ", "dim"), HANG, (self.model["name"], "title"), (architecture, "")])
        if not self.layers:
            return lines + situation_lines(self.device, self.situation.environment, None)
        installed = [plugin.distribution for plugin in self.situation.registry.plugins if not plugin.error]
        lines += device_lines(self.layers[0].selection)
        return lines + plugin_lines([layer.selection for layer in self.layers], installed)

    def lines(self, full: bool = True) -> list[Line]:
        """Return the explanation as styled lines, without warnings; not ``full``: the plan, and one line for each
        rejected backend."""
        lines = self.head_lines()
        render = layer_lines if full else brief_lines
        shown: set[str] = set()
        for layer in self.layers:
            own = [[], *render(layer.selection, layer.kind, layer.count, owners=layer.layers.owners)]
            if (answers := self.answers(layer)) is not None:
                from attn_select_cli.engine_lines import engine_lines

                own += engine_lines(answers, full)
            folded = {text for line in own if OTHERS in (text := plain([line]))}
            lines += [line for line in own if plain([line]) not in shown]
            shown |= folded
        for each in self.unserved:
            from attn_select_cli.unserved_lines import unserved_lines  # it reads the engines' tables

            lines += [[], *unserved_lines(each, self.device)]
        lines += self._page_lines()
        return lines + note_lines([layer.selection for layer in self.layers], full)

    def _page_lines(self) -> list[Line]:
        """Say how long blocks are where attention and states share one pool, and what that wastes."""
        page = state_page([layer.selection for layer in self.layers])
        if page is None:
            return []
        wasted = f"{byte_text(page.wasted_bytes)} ({page.wasted_bytes / page.page_bytes * 100:.1f} %) of it empty"
        text = f"blocks of {page.block_size} tokens, a state in a page of {byte_text(page.page_bytes)}, {wasted}"
        return [[], [("One pool   ", "dim"), HANG, (f"as in vLLM: {text}", "")]]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document; ``docs/json.md`` documents it."""
        layers, unserved = [layer.to_dict() for layer in self.layers], []
        for data, layer in zip(layers, self.layers, strict=True):
            if (answers := self.answers(layer)) is not None:
                data["engine"] = answers.to_dict()
        for each in self.unserved:
            from attn_select_cli.unserved_lines import unserved_data

            unserved.append(unserved_data(each, self.device))
        page = state_page([layer.selection for layer in self.layers])
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "device": self.device.to_dict(),
            "environment": _environment_dict(self.situation),
            "warnings": self.all_warnings,
            "state_page": None if page is None else page.to_dict(),
            "layers": layers,
            "unserved": unserved,
        }


def warnings_of(explanations: Sequence[Explanation]) -> list[str]:
    """Return the warnings of all explanations, each once. Where there are several models, a warning names its own."""
    several = len({explanation.model["name"] for explanation in explanations if explanation.model is not None}) > 1
    seen: dict[str, None] = {}
    for explanation in explanations:
        for warning in explanation.all_warnings:
            whose = explanation.model if several and warning not in explanation.situation.warnings else None
            seen[warning if whose is None else f"{whose['name']}: {warning}"] = None
    return list(seen)


def _environment_dict(situation: Situation) -> dict[str, Any]:
    """Return what a decision rests on: libraries, plugins and rules files."""
    registry, environment = situation.registry, situation.environment
    libraries = {library for spec in registry.specs.values() for group in spec.libraries for library in group}
    return {
        "assumed": environment.assume_installed,
        "cuda": environment.cuda,
        "libraries": {
            each.distribution: {"state": environment.state(each), "version": environment.version(each.distribution)}
            for each in sorted(libraries, key=lambda library: library.distribution)
        },
        "plugins": [plugin.to_dict() for plugin in registry.plugins],
        "rules_files": [layer.to_dict() for layer in situation.rules.layers],
    }


def build_explanations(
    options: Mapping[str, Any],
    models: Sequence[str | None],
    gpus: Sequence[str | None],
    rules: RuleSet | None = None,
    *,
    unserved_alone: bool = False,
) -> list[Explanation]:
    """Decide for every model on every GPU; return the explanations model by model."""
    found = []
    for model in models:
        for gpu in gpus:
            try:
                found.append(_explained({**options, "model": model, "gpu": gpu}, rules, unserved_alone))
            except (ModelError, ConfigError) as error:
                if len(models) * len(gpus) > 1 and not error.message.startswith(f"{model}: "):
                    error.message = f"{model or 'the layer'} on {gpu}: {error.message}"
                raise
    _refuse_idle(found)
    return found


def build_explanation(options: Mapping[str, Any], *, unserved_alone: bool = False) -> Explanation:
    """Decide for one model (or the one layer that flags describe) on one GPU, and return the explanation."""
    return build_explanations(options, [options["model"]], [options["gpu"]], unserved_alone=unserved_alone)[0]


def _refuse_idle(found: list[Explanation]) -> None:
    """Refuse an option that has no effect in any of the explanations."""
    idle = [field for field in found[0].unused if all(field in each.unused for each in found)]
    if idle:
        flags = [flag_of(field) for field in idle]
        models = dict.fromkeys(each.model["name"] for each in found if each.model is not None)
        kinds = dict.fromkeys(layer.kind for each in found for layer in each.layers)
        kinds |= dict.fromkeys(layers.kind for each in found for layers in each.unserved)
        what = f"the layers of {', '.join(models)} ({', '.join(kinds)})" if models else f"a {', '.join(kinds)} layer"
        raise ConfigError(f"{' and '.join(flags)}: no effect on {what}", fields=idle, hint="leave it out")


def _explained(options: Mapping[str, Any], rules: RuleSet | None, unserved_alone: bool) -> Explanation:
    overrides = overrides_from(options)
    if options["model"] is None and "num_heads" not in overrides:
        needed = "--num-heads with --head-size (or --mla, or --recurrence)"
        if "recurrence" in overrides:
            needed = f"--num-heads and --head-size with --recurrence {overrides['recurrence']}"
        raise click.UsageError(f"which layer? Give --model, or {needed}", click.get_current_context(silent=True))
    warnings: list[str] = []
    gpu = "auto" if options["gpu"] is None else options["gpu"]
    if gpu.strip().lower() == "auto":
        found = detect_device()
        device: Device = found.device
        warnings += [*filter(None, [found.note]), *found.warnings]
    else:
        device = lookup(gpu)
    environment = environment_for(device, parse_pins(options["pins"]))
    source = load(options["model"]) if options["model"] is not None else None
    if source is not None:
        logger.info("model: %s, of %s", source.name, source.source)
    kinds = known_layers(source, options, device, overrides)
    if not kinds.kinds and not unserved_alone:
        named = ", ".join(f"{each.count} {each.kind}" for each in kinds.unserved)
        text = f"{shorten(options['model'], 200)}: no backend has a kernel for its layers ({named})"
        raise ModelError(text, hint="`attn-select explain` says what is known of them, and which engines serve them")
    used_rules = rules or tuple(options["rules"]) or None
    situation = situation_for(device, used_rules, environment)
    warnings += unknown_pins(environment.pins, situation)
    backend = tuple(options["backend"]) or None
    configs = [kind.config for kind in kinds.kinds]
    times, no_times = options.get("times"), bool(options.get("no_times"))
    if times is not None and no_times:
        raise click.UsageError("--times and --no-times: give one of them", click.get_current_context(silent=True))
    selections = select_model(
        configs,
        device,
        used_rules,
        backend,
        environment=environment,
        workload=options.get("workload"),
        times=not no_times if times is None else times,
        host_time=bool(options.get("host_time")),
    )
    described = {"name": source.name, "architecture": source.architecture, "source": source.source} if source else None
    layers, engine = [LayerExplanation(*pair) for pair in zip(kinds.kinds, selections, strict=True)], None
    warnings += kinds.warnings
    if options.get("engine") is not None:
        from attn_select.engines.names import engine_table  # few commands ask for one

        engine = engine_table(options["engine"])
    return Explanation(described, layers, warnings, situation, kinds.unserved, kinds.unused, engine)


def known_layers(
    source: ModelSource | None, options: Mapping[str, Any], device: Device, overrides: Mapping[str, Any]
) -> LayerKinds:
    """Return a model's layers, or the layers that the overrides describe."""
    kinds = layer_kinds(source, tensor_parallel_size=options["tensor_parallel"], device=device, overrides=overrides)
    if source is not None and not kinds.type_known and not options.get("assume_attention"):
        named = f"model type {shorten(source.model_type)!r} is not known" if source.model_type else "no model_type"
        raise UnknownModelTypeError(
            f"{shorten(source.name, 200)}: {named}. The usual fields alone do not say which of its layers attend, and "
            "with which windows or latents",
            hint="--assume-attention reads it as a Llama-like decoder by the usual field names",
        )
    return kinds


def unknown_pins(pins: Mapping[str, str], situation: Situation) -> list[str]:
    """Return a warning for every ``--with`` library that neither a backend nor a rule asks about."""
    specs = situation.registry.specs.values()
    known = {"cuda", *(x.distribution for spec in specs for group in spec.libraries for x in group)}
    conditions = [condition.field for rule in situation.rules.rules for condition in rule.when]
    known |= {canonical_distribution(f.removeprefix("library.")) for f in conditions if f.startswith("library.")}
    return [
        f"--with {name}: no backend and no rule asks about it; {UnknownNameError('library', name, sorted(known)).hint}"
        for name in pins
        if name not in known
    ]
