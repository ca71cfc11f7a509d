"""``explain_model``: what serves each layer of a model, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from attn_select import AttentionConfig, Selection, configs_from_model, select
from attn_select.decide.selector import rules_in_an_engine
from attn_select.errors import ConfigError
from attn_select_transformers.kinds import choices_of
from attn_select_transformers.refusal import require_served


@dataclass(slots=True)
class LayerChoice:
    """Layers that ask for the same attention.

    Attributes:
        modules: their names in the model; empty where the model has not run so.
        count: how many there are.
        selection: what was chosen, with every candidate's reasons.
    """

    modules: list[str]
    count: int
    selection: Selection


@dataclass(slots=True)
class ModelExplanation:
    """What serves a model's layers.

    Attributes:
        layers: per kind of layers, in order of appearance.
        without_kernel: why calls went to torch's masked attention, each with the modules that it happened to.
        ran: whether this is what ran; else it is what the model's config says.
        warnings: what should be known about the reading of the config.
    """

    layers: list[LayerChoice]
    without_kernel: dict[str, list[str]] = field(default_factory=dict)
    ran: bool = True
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = (
            [] if self.ran else ["not run with attn_implementation='attn_select': this is what its config would get"]
        )
        for layer in self.layers:
            names = f": {_shortened(layer.modules)}" if layer.modules else ""
            lines += [f"{layer.count} layers{names}", layer.selection.explain(), ""]
        for reason, modules in self.without_kernel.items():
            lines += [f"TORCH_SDPA with the mask, {len(modules)} layers: {_shortened(modules)}", f"  {reason}", ""]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines).rstrip()


def explain_model(model: nn.Module) -> ModelExplanation:
    """Return what serves each attention layer of a transformers model, and why.

    After the model has run with ``attn_implementation="attn_select"`` it is what ran, per module. Before, it is what
    the model's config says of its text part.

    Raises:
        ModelNotServedError: the model cannot run so.
        ModelError: the model has not run, and its config does not describe attention layers.
    """
    found: dict[AttentionConfig, LayerChoice] = {}
    reasons: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        choices = choices_of(module)
        for kind in choices.kinds:
            choice = found.setdefault(kind.config, LayerChoice([], 0, kind.selection))
            choice.modules.append(name)
            choice.count += 1
        for reason in choices.without_kernel:
            reasons.setdefault(reason, []).append(name)
    if found or reasons:
        return ModelExplanation(list(found.values()), reasons)
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ConfigError("the model has no parameters: their dtype and device decide", fields=["model"])
    require_served(type(model))
    kinds = configs_from_model(model.config, overrides={"dtype": parameter.dtype, "kv_cache_dtype": "auto"})
    device = "cpu" if parameter.device.type == "cpu" else None
    rules = rules_in_an_engine()
    layers = [
        LayerChoice([], kind.count, select(kind.config, device, rules))
        for kind in kinds.kinds
        if isinstance(kind.config, AttentionConfig)  # transformers runs layers that keep a state by itself
    ]
    return ModelExplanation(layers, ran=False, warnings=kinds.warnings)


def _shortened(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"
