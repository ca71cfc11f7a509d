"""``FLA`` runs what its spec promises: on a CPU by emulated functions, on a GPU by fla-core's own."""

from __future__ import annotations

from collections.abc import Iterator

import fla_emulated
import pytest
import torch

from attn_select.layer.state import RECURRENCES, RecurrenceName, StateConfig
from attn_select.machine.device import lookup
from attn_select.runtime import prepare_batch
from attn_select.runtime.states import Gates, LinearAttention, StateGroup, StatePool
from attn_select.testing.state_conformance import StateConformance
from attn_select.testing.toolkit import emulated_modules, selection_of
from attn_select_fla.facts.fla import FLA


class TestFla(StateConformance):
    spec = FLA
    gate_device = lookup("h200")
    longest = 40

    @pytest.fixture(autouse=True)
    def _emulated(self) -> Iterator[None]:
        with emulated_modules(fla_emulated.MODULES):
            yield

    @pytest.mark.parametrize("recurrence", RECURRENCES)
    def test_prefills_forget_as_much_as_the_kernels_can(self, recurrence: RecurrenceName) -> None:
        """They get -60 for anything less: the emulated ones refuse less, which the library's would turn into NaN."""
        config = StateConfig(recurrence=recurrence, num_heads=1, head_size=8, dtype="float16")
        group = StateGroup(selection_of(FLA, config, lookup("h200")), "cpu")
        layer, cache, pool = LinearAttention(group), group.allocate(3), StatePool(3)
        log_decay = torch.full((9, 1, 8) if config.rule.decay == "channel" else (9, 1), -0.1)
        log_decay[3], log_decay[5], log_decay[6] = -torch.inf, -1e6, -59.0
        channels = torch.randn(9, config.width).half()
        gates = Gates(log_decay, torch.rand(9, 1) if config.rule.writes else None)
        found = []
        for name, lens in (("at once", [9]), ("each", [1] * 9)):
            pool.add(name)
            parts, seen = [], 0
            for tokens in lens:
                metadata = group.build(prepare_batch([tokens], [seen + tokens]), pool.step({name: tokens}))
                rows = slice(seen, seen + tokens)
                parts.append(layer(channels[rows], gates.rows(rows), cache, metadata))
                seen += tokens
            found.append(torch.cat(parts))
        assert torch.isfinite(found[0]).all()
        torch.testing.assert_close(*found, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
class TestFlaOnGpu(StateConformance):
    spec = FLA
    device = "cuda"
    num_configs = 60
    sizes = (16, 32, 64, 128, 256)
