"""Where the kernels run: on a GPU, or without one in Triton's interpreter; what the tests of the kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import triton_interpreter  # noqa: F401


@pytest.fixture
def device() -> Any:
    """Where kernels run here."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def terms_of() -> Callable[[Any], Any]:
    """A function from a ``Problem`` to the kernels' ``Terms``."""
    import torch

    from attn_select_triton.kernels.launch import Terms

    def make(problem: Any) -> Terms:
        config, ranges = problem.config, None
        if problem.mm_prefix_ranges is not None:
            most = max(1, *(len(one) for one in problem.mm_prefix_ranges))
            padded = [[*one, *[(1, 0)] * (most - len(one))] for one in problem.mm_prefix_ranges]
            ranges = torch.tensor(padded, dtype=torch.int32, device=problem.query.device)
        return Terms(
            causal=config.attn_type == "decoder" and not config.non_causal,
            window=config.sliding_window or 0,
            soft_cap=config.logits_soft_cap or 0.0,
            slopes=problem.alibi_slopes,
            sinks=problem.sinks,
            ranges=ranges,
        )

    return make


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps so small have a launch for their decodes and others for their prefills, as larger ones do."""
    from attn_select_triton.runtime import schedule

    monkeypatch.setattr(schedule, "few_keys", lambda *_: False)
