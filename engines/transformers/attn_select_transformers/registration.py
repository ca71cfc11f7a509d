"""``attn_implementation="attn_select"``: what transformers calls for it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn

from attn_select.engines.adapter import Adapter
from attn_select.machine.amx import avoid_trapping_amx
from attn_select_transformers import captured, continuous, dense, paged, refusal
from attn_select_transformers.names import DENSE, PAGED
from attn_select_transformers.own_attention import leave_to_transformers
from attn_select_transformers.releases import RELEASES

logger = logging.getLogger("attn_select_transformers")
_PAGED_CACHES: list[type] = []


@functools.cache
def register() -> bool:
    """Make ``attn_implementation="attn_select"`` known to transformers; a second call changes nothing.

    Returns:
        Whether attn-select takes part. In a release that it was not run with (``releases.RELEASES``) it does not: one
        warning says so, and the name stands for transformers' own attention.

    Raises:
        ImportError: transformers is not installed.
    """
    avoid_trapping_amx()
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    adapter = Adapter("attn-select-transformers", "transformers", transformers.__version__, RELEASES, logger.warning)
    AttentionMaskInterface.register(DENSE, sdpa_mask)
    if not adapter.takes_part() or not adapter.unless_it_fails(lambda: _installed(adapter)):
        leave_to_transformers()
        return False
    for name in (DENSE, PAGED):
        AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(PAGED, _no_mask)
    return True


def _installed(adapter: Adapter) -> bool:
    """Change transformers where it has the interfaces, and attn-select's settings can be read."""
    adapter.rules()
    _PAGED_CACHES.append(continuous.install())
    refusal.install()
    return True


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
    if cache is not None and isinstance(cache, tuple(_PAGED_CACHES)):
        layer = continuous.layer_of(cache, module.layer_idx)  # type: ignore[arg-type]
        graphs = captured.graphs_of(cache)
        return paged.attend(layer, cache, module, query, key, value, scaling, options, graphs), None
    return dense.attend(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)
