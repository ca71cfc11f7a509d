"""``TRITON_STATE`` runs what its spec promises: in the interpreter on a CPU, compiled where there is a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from attn_select.backends.spec import Fact
from attn_select.layer.state import RECURRENCES, RecurrenceName, StateConfig
from attn_select.machine.device import lookup
from attn_select.reference.oracle_state import state_reference
from attn_select.runtime import prepare_batch
from attn_select.runtime.states import Gates, LinearAttention, StateGroup, StatePool
from attn_select.testing.state_conformance import StateConformance
from attn_select.testing.toolkit import selection_of
from attn_select_triton.facts.triton_state import CAPABILITIES, TRITON_STATE

_DTYPES = Fact(("float16", "float32"), "what the interpreter rounds right")


class TestInterpreted(StateConformance):
    """Few steps, since the interpreter takes a second for each."""

    spec = replace(TRITON_STATE, capabilities={"decode": replace(CAPABILITIES, dtypes=_DTYPES, state_dtypes=_DTYPES)})
    gate_device = lookup("h100")
    num_configs = 24
    steps = 5
    sizes = (8, 24, 33, 64)


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_any_decays_and_an_output_of_any_strides(recurrence: RecurrenceName, device: torch.device) -> None:
    config = StateConfig(
        recurrence=recurrence, num_heads=2, head_size=8, v_head_size=16, dtype="float32", num_speculative_tokens=7
    )
    group = StateGroup(selection_of(TRITON_STATE, config, lookup("h100")), device)
    layer, cache, pool = LinearAttention(group), group.allocate(9), StatePool(9, 7)
    pool.add("a")
    draw = torch.Generator().manual_seed(0)
    log_decay = -torch.rand(8, 2, *([8] if config.rule.decay == "channel" else []), generator=draw)
    log_decay[2], log_decay[4], log_decay[6] = -1e6, -torch.inf, 0.0
    channels = torch.randn(8, config.width, generator=draw)
    strength = torch.rand(8, 2, generator=draw) if config.rule.writes else None
    gates = Gates(log_decay.to(device), None if strength is None else strength.to(device))
    output = torch.full((16, 2, 8), torch.nan, device=device).permute(2, 1, 0)
    metadata = group.build(prepare_batch([8], [8], device=device), pool.step({"a": 8}))
    assert layer(channels.to(device), gates, cache, metadata, output) is output
    sizes = [32 if name == "value" else 16 for name in config.rule.channels]
    named = dict(zip(config.rule.channels, channels.split(sizes, 1), strict=True))
    tokens = (named["query"].view(8, 2, 8), named["key"].view(8, 2, 8), named["value"].view(8, 2, 16))
    wanted, _ = state_reference(config, *tokens, log_decay, strength, None)
    torch.testing.assert_close(output.cpu().double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
class TestTritonStateOnGpu(StateConformance):
    spec = TRITON_STATE
    device = "cuda"
    num_configs = 60
