"""Compiling the kernels of layers before the layers that will launch them are there."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from attn_select.decide.selection import Selection
from attn_select.layer.features import PER_HEAD
from attn_select.runtime import Attention, MLAAttention, MLALayerGroup, attention_group
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select.runtime.warm_up import GroupSteps, WarmUp, compile_kernels

_compiled: set[Hashable] = set()
"""What ``compile_in_an_engine`` has seen in this process."""


def stand_in(selection: Selection[Any], *arguments: Any, **options: Any) -> Attention | MLAAttention:
    """Return a layer of a group of its own, whose weights say nothing: what is compiled for it, others launch."""
    config = selection.config
    group = attention_group(selection, *arguments, **options)
    ones = torch.ones(config.num_heads, dtype=torch.float32, device=group.device)
    terms: dict[str, Any] = {
        name: ones.to(PLAIN_DTYPES[config.dtype])  # as models keep them
        for name, field in PER_HEAD.items()
        if getattr(config, field)
    }
    if isinstance(group, MLALayerGroup):
        rows = config.num_heads * ((config.qk_nope_head_dim or 0) + (config.v_head_dim or 0))
        weight = torch.zeros(rows, config.kv_lora_rank or 0, dtype=PLAIN_DTYPES[config.dtype], device=group.device)
        return MLAAttention(group, weight, **terms)
    return Attention(group, **terms)


def compile_ahead(selections: Sequence[Selection[Any]], *arguments: Any, **options: Any) -> WarmUp:
    """Compile the kernels of all these layers side by side, where their one backend can; run no step.

    A kernel that Triton's cache on the disk holds is read from there, and counts too. Further arguments and errors are
    those of ``attention_group``.

    Returns:
        What was done.
    """
    began = time.perf_counter()
    layers = [stand_in(each, *arguments, **options) for each in selections if _compiles(each)]
    kernels = compile_kernels([GroupSteps(layer.group) for layer in layers], lambda *_: None)
    return WarmUp(kernels, 0, time.perf_counter() - began)


def _compiles(selection: Selection[Any]) -> bool:
    """Whether a backend of the selection compiles kernels side by side: a group of others would be for nothing."""
    return any(spec is not None and spec.get_class().compiling for spec in selection.backends.values())


def compile_in_an_engine(
    selections: Sequence[Selection[Any]],
    *arguments: Any,
    logger: logging.Logger,
    **options: Any,
) -> None:
    """Compile ahead what an engine's layers will launch, each kind of layers once in a process."""
    # Layers whose contexts ranks share are left out: they have no group without the other ranks. What goes wrong is a
    # warning, and the engine starts all the same: each kernel then compiles in the first step that needs it.
    new: dict[Hashable, Selection[Any]] = {}
    for selection in selections:
        config, names = selection.config, [spec.name for spec in selection.backends.values() if spec is not None]
        key = (config, selection.block_size, *names)
        if config.decode_context_parallel_size == 1 and key not in _compiled:
            new[key] = selection
    _compiled.update(new)
    try:
        done = compile_ahead([*new.values()], *arguments, **options)
    except Exception as error:
        logger.warning("attn-select: kernels were not compiled ahead, each compiles in the first step: %s", error)
        return
    if done.kernels:
        text = "attn-select: %d kernels compiled side by side, or read from their cache, in %.1f s"
        logger.info(text, done.kernels, done.seconds)
