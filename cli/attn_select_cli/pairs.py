"""The options that say which models and which GPUs a table of pairs is about, shared by matrix and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from attn_select_cli.layer_options import gpu_option, model_option

F = TypeVar("F", bound=Callable[..., Any])

MODELS = ("llama-3-8b", "qwen3-32b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "deepseek-v3.2", "bert-base")
GPUS = ("a100", "l40s", "h100", "b200", "rtx5090")


def pair_options(function: F) -> F:
    """Add ``--model``, ``--gpu``, ``--all-models`` and ``--all-gpus``; ``models_and_gpus`` reads them."""
    for option in (
        click.option("--all-gpus", is_flag=True, help="Every known GPU."),
        click.option("--all-models", is_flag=True, help="Every preset."),
        gpu_option(f"A device (repeatable) [default: {', '.join(GPUS)}].", several=True),
        model_option(f"A model (repeatable) [default: {', '.join(MODELS)}].", several=True),
    ):
        function = option(function)
    return function


def models_and_gpus(options: dict[str, Any]) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Take the options of ``pair_options`` out of ``options``; return the models and the GPUs."""
    from attn_select.layer.models import presets
    from attn_select.machine.device import known_gpus

    model, gpu, all_models, all_gpus = (options.pop(name) for name in ("model", "gpu", "all_models", "all_gpus"))
    for flag, everything, named in (("--model", all_models, model), ("--gpu", all_gpus, gpu)):
        if everything and named:
            raise click.UsageError(f"--all-{flag[2:]}s takes every one: leave out {flag} {named[0]}")
    models: tuple[str | None, ...] = tuple(presets()) if all_models else model or MODELS
    if options["num_heads"] is not None and not model and not all_models:
        models = (None,)  # flags alone describe one layer
    return models, tuple(known_gpus()) if all_gpus else gpu or GPUS
