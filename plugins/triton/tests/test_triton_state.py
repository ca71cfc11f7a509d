"""``TRITON_STATE`` runs what its spec promises: in the interpreter on a CPU, compiled where there is a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="needs triton")

from attn_select.backends.spec import Fact
from attn_select.machine.device import lookup
from attn_select.testing.state_conformance import StateConformance
from attn_select_triton.facts.triton_state import CAPABILITIES, TRITON_STATE

_DTYPES = Fact(("float16", "float32"), "what the interpreter rounds right")


class TestInterpreted(StateConformance):
    """Few steps, since the interpreter takes a second for each."""

    spec = replace(TRITON_STATE, capabilities={"decode": replace(CAPABILITIES, dtypes=_DTYPES, state_dtypes=_DTYPES)})
    gate_device = lookup("h100")
    num_configs = 24
    steps = 5
    sizes = (8, 24, 33, 64)


@pytest.mark.gpu
class TestTritonStateOnGpu(StateConformance):
    spec = TRITON_STATE
    device = "cuda"
    num_configs = 60
