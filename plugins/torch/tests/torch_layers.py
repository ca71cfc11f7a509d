"""What the tests of the runtimes share: the context of one layer, comparison with the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_select.backends.spec import BackendSpec
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import CPU, Device
from attn_select.machine.environment import Environment
from attn_select.reference.comparison import ErrorBound, lse_error, relative_error
from attn_select.runtime.backend import BackendContext
from attn_select.testing.toolkit import outcomes, plans_of


def context_of(spec: BackendSpec, config: AttentionConfig, device: torch.device, **given: Any) -> BackendContext:
    """Return what a builder and an impl are made with; ``given`` are the context's other fields."""
    asked = CPU if device.type == "cpu" else Device("gpu", torch.cuda.get_device_capability(device))
    found = outcomes(spec, config, asked, Environment(assume_installed=True), spec.options())
    plans = plans_of(found)
    assert plans.keys() == found.keys(), found
    return BackendContext(config=config, plans=plans, device=device, options=spec.options(), **given)


def check_close(output: Tensor, lse: Tensor | None, expected: Tensor, expected_lse: Tensor, bound: ErrorBound) -> None:
    """Compare a result with the oracle's; an LSE only where there is one."""
    error = relative_error(output, expected)
    assert error.norm <= bound.norm, (error, bound)
    assert error.row <= bound.row, (error, bound)
    if lse is not None:
        assert lse_error(lse, expected_lse) <= bound.lse, (lse_error(lse, expected_lse), bound)
