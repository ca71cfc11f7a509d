"""The backend runs what its spec promises: emulated on a CPU, the real kernels where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_select_cudnn.facts.cudnn_attn import CUDNN_ATTN

pytest.importorskip("torch")

from attn_select.testing import BackendConformance


class Emulated(BackendConformance):
    spec = CUDNN_ATTN
    device = "cpu"
    num_configs = 60  # the real kernels are run on more

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[..., Any]) -> None:
        emulate()


class TestOnHopper(Emulated):
    gate_device = "h100"


class TestOnBlackwell(Emulated):
    gate_device = "b200"
    num_configs = 20


@pytest.mark.gpu
class TestCudnnAttn(BackendConformance):
    spec = CUDNN_ATTN
    device = "cuda"
