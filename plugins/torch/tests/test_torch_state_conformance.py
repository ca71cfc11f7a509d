"""``TORCH_STATE`` runs what its spec promises, on a CPU and, where there is one, on a GPU."""

from __future__ import annotations

import pytest

from attn_select.testing.state_conformance import StateConformance
from attn_select_torch.facts.torch_state import TORCH_STATE


class TestTorchState(StateConformance):
    spec = TORCH_STATE


@pytest.mark.gpu
class TestTorchStateOnGpu(StateConformance):
    spec = TORCH_STATE
    device = "cuda"
