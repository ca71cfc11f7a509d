"""Models whose attention is not an attention function: ``attn_implementation="attn_select"`` is refused for them.

Such a model attends in its own code. The name would be accepted and change only the mask that this code gets: from one
that is added to the scores to a boolean one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from attn_select.engines.wrap import wrap
from attn_select.errors import AttnSelectError
from attn_select_transformers.names import DENSE, PAGED

NOT_SERVED = {"umt5": ("5.17", "5.19", "5.20", "5.21", "5.22")}
"""Releases by model type whose model computes something else with sdpa than with eager attention: in 5.17 the decoder
of UMT5 gets no mask and does not say that it is causal. 5.19 to 5.22 were not tried."""


class ModelNotServedError(AttnSelectError, ValueError):
    """A model whose attention transformers lets nobody replace; says what to use instead."""

    code = "model-not-served"


def install() -> None:
    """Refuse such models when they are loaded with the name, and by ``set_attn_implementation``; once."""
    # Raises AttributeError where transformers chooses implementations in another place.
    from transformers import PreTrainedModel

    _ = PreTrainedModel._can_set_attn_implementation, PreTrainedModel.set_attn_implementation
    wrap(PreTrainedModel, "get_correct_attn_implementation", _get_correct_attn_implementation)
    wrap(PreTrainedModel, "set_attn_implementation", _set_attn_implementation)


def _get_correct_attn_implementation(
    original: Callable[..., Any], model: Any, requested_attention: str | None, *rest: Any, **options: Any
) -> Any:
    if requested_attention in (DENSE, PAGED):
        require_served(type(model))
    return original(model, requested_attention, *rest, **options)


def _set_attn_implementation(
    original: Callable[..., Any], model: Any, attn_implementation: Any, *rest: Any, **options: Any
) -> Any:
    own = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
    if own in (DENSE, PAGED):
        require_served(type(model))
    return original(model, attn_implementation, *rest, **options)


def require_served(model: type[Any]) -> None:
    """Raise ModelNotServedError unless a model attends through transformers' functions, whatever mask these get."""
    if not _is_served(model):
        use = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        raise ModelNotServedError(
            f"{model.__name__} computes attention in code of its own, or depends on how masks are written: "
            f"attn_implementation={DENSE!r} is not for it",
            hint=f'load it with attn_implementation="{use}"; where it is a part of another model, name each part: '
            f'attn_implementation={{"text_config": "{DENSE}", "vision_config": "{use}"}}',
        )


def _is_served(model: type[Any]) -> bool:
    """Whether transformers says so of a class: by its source, and by a flag that its authors set."""
    # Modules that hold a table of attention classes look the name up there, and know their own alone.
    import transformers

    release = transformers.__version__.rpartition(".")[0]
    if release in NOT_SERVED.get(getattr(model.config_class, "model_type", ""), ()):
        return False
    names = vars(sys.modules[model.__module__])
    if not model._can_set_attn_implementation() or any(name.endswith("_ATTENTION_CLASSES") for name in names):
        return False
    attends = any(
        "Attention" in name and isinstance(one, type) and issubclass(one, nn.Module) for name, one in names.items()
    )
    return not attends or bool(model._supports_sdpa or model._supports_attention_backend)
