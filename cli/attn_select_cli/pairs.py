"""The options that say which models and which GPUs a table of pairs is about, shared by matrix and report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from attn_select_cli.layer_options import gpu_option, model_option

F = TypeVar("F", bound=Callable[..., Any])

MODELS = ("llama-3-8b", "qwen3-32b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "deepseek-v3.2", "bert-base")
GPUS = ("a100", "l40s", "h100", "b200", "rtx5090")


def pair_options(function: F) -> F:
    """Add ``--model`` and ``--gpu``; ``models_and_gpus`` reads them."""
    function = gpu_option(f"A device (repeatable) [default: {', '.join(GPUS)}].", several=True)(function)
    with_both: F = model_option(f"A model (repeatable) [default: {', '.join(MODELS)}].", several=True)(function)
    return with_both


def models_and_gpus(options: dict[str, Any]) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Take the options of ``pair_options`` out of ``options``; return the models and the GPUs."""
    model, gpu = options.pop("model"), options.pop("gpu")
    if options["num_heads"] is not None and not model:
        model = (None,)  # flags alone describe one layer
    return model or MODELS, gpu or GPUS
