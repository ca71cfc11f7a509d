"""``attn_implementation="attn_select"``: what transformers calls for it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from attn_select.engines.adapter import Adapter
from attn_select.engines.wrap import wrap
from attn_select.machine.amx import avoid_trapping_amx
from attn_select_transformers import captured, continuous, dense, paged, refusal
from attn_select_transformers.names import DENSE, PAGED

logger = logging.getLogger("attn_select_transformers")
RELEASES = ("5.17", "5.19", "5.20", "5.21", "5.22", "5.23")
"""The releases of transformers that this adapter was run with; docs/engines.md says what ran where."""


@functools.cache
def register() -> bool:
    """Make ``attn_implementation="attn_select"`` known to transformers; a second call changes nothing.

    Returns:
        Whether attn-select takes part. In a release that it was not run with (``RELEASES``) it does not: one
        warning says so, and the name stands for transformers' own attention.

    Raises:
        ImportError: transformers is not installed.
    """
    avoid_trapping_amx()
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask

    adapter = Adapter("attn-select-transformers", "transformers", transformers.__version__, RELEASES, logger.warning)
    if not adapter.joins(lambda: _install(adapter)):
        # The name stands for transformers' own choice, so that no model is ever set to it.
        adapter.unless_it_fails(lambda: wrap(PreTrainedModel, "get_correct_attn_implementation", _own_choice))
        return False
    for name, mask in ((DENSE, sdpa_mask), (PAGED, _no_mask)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)
    return True


def _install(adapter: Adapter) -> None:
    """Change transformers where it has the interfaces, and attn-select's settings can be read."""
    adapter.rules()
    continuous.install()
    refusal.install()


def _own_choice(
    original: Callable[..., Any], model: Any, requested_attention: str | None, *rest: Any, **options: Any
) -> Any:
    """Choose as where the user has named no attention."""
    return original(model, None if requested_attention == DENSE else requested_attention, *rest, **options)


def _no_mask(*_: Any, **__: Any) -> None:
    """Continuous batching packs its requests; where they begin and end is in the step's arguments."""


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="attn_implementation='attn_select' reads masks and plans kernels on the host, so it is not traced: compile "
    "with fullgraph=False, or load the model with attn_implementation='sdpa'"
)
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend, in ``generate()`` and in continuous batching; see ``dense.attend`` and ``paged.attend``."""
    if cache is not None:  # continuous batching alone gives one
        layer = continuous.layer_of(cache, module.layer_idx)  # type: ignore[arg-type]
        graphs = captured.graphs_of(cache)
        return paged.attend(layer, cache, module, query, key, value, scaling, options, graphs), None
    return dense.attend(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)
