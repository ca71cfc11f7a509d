"""The calls are those of the installed fla-core; its decode kernels give the float64 recurrence's results."""

from __future__ import annotations

import inspect
from typing import Any

import fla_emulated
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fla", reason="needs fla-core")
pytest.importorskip("triton", reason="needs triton")

from attn_select.layer.state import RECURRENCES, StateConfig  # noqa: E402
from attn_select.machine.device import lookup  # noqa: E402
from attn_select.reference.state_serving import StateServing, state_bound  # noqa: E402
from attn_select.testing.toolkit import selection_of  # noqa: E402
from attn_select_fla.facts.fla import FLA, FlaKernel, kernel_of  # noqa: E402
from attn_select_fla.runtime.fla import operation  # noqa: E402

# On a CPU fla-core says that it rolls back to one, and einops and Triton warn of their own.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("module", fla_emulated.MODULES)
def test_the_emulated_functions_have_arguments_of_the_real_ones(module: str) -> None:
    for name, emulated in fla_emulated.MODULES[module].items():
        real = inspect.signature(operation(FlaKernel(module, name))).parameters
        for argument, parameter in inspect.signature(emulated).parameters.items():
            assert argument in real, f"{name} of fla-core has no {argument}"
            given = parameter.default is not inspect.Parameter.empty
            assert not given or parameter.default == real[argument].default, f"{argument} of {name}"


@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_both_operations_are_there(recurrence: Any) -> None:
    config = StateConfig(recurrence=recurrence, num_heads=2, head_size=16)
    for phase in ("prefill", "decode"):
        assert callable(operation(kernel_of(config, phase)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the conformance suite runs these kernels")
@pytest.mark.parametrize("recurrence", RECURRENCES)
def test_decodes_in_the_interpreter(recurrence: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes alone: the interpreter does not run the chunked kernels."""
    import triton_interpreter  # noqa: F401  # teaches Triton's interpreter the tests' NumPy
    from triton.runtime.autotuner import Autotuner

    # There is nothing to time: the first configuration is as good as any.
    monkeypatch.setattr(Autotuner, "do_bench", lambda self, call, quantiles: [0.0] * len(quantiles))
    group = 1 if recurrence == "kda" else 2
    config = StateConfig(
        recurrence=recurrence,
        num_heads=2,
        num_v_heads=2 * group,
        head_size=16,
        v_head_size=24,
        dtype="float16",
        conv_kernel_size=4,
        num_speculative_tokens=1,
    )
    serving = StateServing(selection_of(FLA, config, lookup("h200"), phases=("decode",)), 8, 0, "cpu")
    for request in ("a", "b"):
        serving.add(request)
    for lens in ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"b": 1}):
        error = serving.step(lens)
        assert error.norm <= state_bound(config).norm
        assert error.row <= state_bound(config).row
