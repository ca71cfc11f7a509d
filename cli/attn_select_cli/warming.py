"""Runs every kind of step once through the kernels of a selection, so that they are compiled."""

from __future__ import annotations

import time
from typing import Any

import torch

from attn_select.decide.selection import Selection
from attn_select.layer.state import StateConfig
from attn_select.reference.timed_steps import StateStep
from attn_select.runtime import Capacity
from attn_select.runtime.compile_ahead import stand_in
from attn_select.runtime.warm_up import SHORT, USUAL, WarmUp

_FEW = 4


def warm(selection: Selection[Any], bounds: tuple[int, int, int]) -> WarmUp:
    """Warm one kind of layers, for steps of so many requests and tokens, and requests of so many tokens."""
    if isinstance(selection.config, StateConfig):
        return _warm_states(selection, bounds)
    layer = stand_in(selection, capacity=Capacity(*bounds), cuda_graphs=not selection.device.is_cpu)
    found: WarmUp = layer.group.warm_up()
    return found


def _warm_states(selection: Selection[StateConfig], bounds: tuple[int, int, int]) -> WarmUp:
    """Run decodes and prefills of one request and of a few: no kernel is compiled for a number of them."""
    began, (requests, tokens, length) = time.perf_counter(), bounds
    lens = [(each, each + 1) for each in {1, selection.config.max_decode_query_len}]  # these have a state
    lens += [(each, each) for each in {min(each, tokens, length) for each in (SHORT, USUAL)}]
    done = 0
    for query_len, seq_len in lens:
        for count in {1, max(1, min(_FEW, requests, tokens // query_len))}:
            step = StateStep(selection, [(query_len, seq_len)] * count)
            step.make_layers(step.memory(step.cache_bytes, 1).caches(step))
            for call in step.calls():
                call()
            done += 1
    if step.group.device.type == "cuda":
        torch.cuda.synchronize()
    return WarmUp(0, done, time.perf_counter() - began)
