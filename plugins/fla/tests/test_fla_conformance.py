"""``FLA`` runs what its spec promises: on a CPU by emulated functions, on a GPU by fla-core's own."""

from __future__ import annotations

from collections.abc import Iterator

import fla_emulated
import pytest

from attn_select.machine.device import lookup
from attn_select.testing.state_conformance import StateConformance
from attn_select.testing.toolkit import emulated_modules
from attn_select_fla.facts.fla import FLA


class TestFla(StateConformance):
    spec = FLA
    gate_device = lookup("h200")
    longest = 40

    @pytest.fixture(autouse=True)
    def _emulated(self) -> Iterator[None]:
        with emulated_modules(fla_emulated.MODULES):
            yield


@pytest.mark.gpu
class TestFlaOnGpu(StateConformance):
    spec = FLA
    device = "cuda"
    num_configs = 60
    sizes = (16, 32, 64, 128, 256)
