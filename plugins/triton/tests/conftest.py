"""Where the kernels run: on a GPU, or without one in Triton's interpreter; what the tests of the kernels share."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None


def _interpret() -> None:
    """Turn the interpreter on, before any kernel is defined; teach it NumPy 2.4, whose arrays of one are no index."""
    import torch

    torch.set_num_threads(1)
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


# Where another test brought triton first, its own functions are compiled ones, which cannot be interpreted.
TOO_LATE = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
if HAS_TRITON and not TOO_LATE:
    _interpret()

# Tests are imported one by one, so what they share is put in `sys.modules` by hand.
for _name in ("layers", "mla_layers") if HAS_TRITON else ():
    _spec = importlib.util.spec_from_file_location(f"triton_{_name}", Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_spec.name])


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> None:
    """Skip tests of kernels where they can run in no way."""
    import torch

    if TOO_LATE and not torch.cuda.is_available() and hasattr(request.module, "torch"):
        pytest.skip("triton was imported before its interpreter could be turned on: run pytest with TRITON_INTERPRET=1")


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
