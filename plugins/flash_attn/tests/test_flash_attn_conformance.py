"""Both backends run what their specs promise: every provider emulated on a CPU, the real ones where there is a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.selector import environment_for
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.detection import detect_device
from attn_select.machine.environment import Environment, installed_version
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN
from attn_select_flash_attn.facts.flash_attn_mla import FLASH_ATTN_MLA
from attn_select_flash_attn.facts.flash_attn_mla_sparse import FLASH_ATTN_MLA_SPARSE

pytest.importorskip("torch")

import torch

from attn_select.reference.comparison import ErrorBound, error_bound
from attn_select.testing import BackendConformance, mla_layer, selection_of
from attn_select.testing.conformance_configs import Case
from attn_select.testing.conformance_run import Rig
from attn_select.testing.toolkit import outcomes, plans_of, selection_for


class Suite(BackendConformance):
    def error_bound(self, config: AttentionConfig, plans: Mapping[Phase, BackendPlan]) -> ErrorBound:
        """Kernels take sinks in bfloat16, which the plan notes: a float16 layer's are off by that rounding."""
        bound = error_bound(config, plans)
        if not config.sinks or config.dtype == "bfloat16":
            return bound
        in_bf16 = error_bound(config.model_copy(update={"dtype": "bfloat16"}), plans)
        return ErrorBound(
            max(bound.norm, in_bf16.norm), max(bound.row, in_bf16.row), 2 * in_bf16.lse, "sinks rounded to bfloat16"
        )


class Emulated(Suite):
    device = "cpu"
    gate_device = "h100"
    num_configs = 60  # the real kernels are run on more

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[[str], Any]) -> None:
        emulate(self.options["provider"])


FEW = {"num_configs": 10}
"""For the same kernel from another distribution: only what the adapter passes differs."""
SUITES: dict[str, tuple[BackendSpec, dict[str, Any], dict[str, Any]]] = {
    "TestVllmFA3": (FLASH_ATTN, {"provider": "vllm", "version": 3}, {}),
    "TestVllmFA2": (FLASH_ATTN, {"provider": "vllm"}, {"gate_device": "a100"}),
    "TestUpstreamFA3": (FLASH_ATTN, {"provider": "flash-attn-3"}, FEW),
    # Its pages of 256 tokens and the lack of FP8 leave few to run.
    "TestUpstreamFA2": (FLASH_ATTN, {"provider": "flash-attn"}, {"gate_device": "a100", "num_configs": 30}),
    "TestSglangKernel": (FLASH_ATTN, {"provider": "sglang-kernel"}, FEW),
    "TestSglKernel": (FLASH_ATTN, {"provider": "sgl-kernel"}, FEW),
    # On Hopper, where its keys are not split; on Blackwell, where it takes FP8 and few head sizes above 128.
    "TestFA4": (FLASH_ATTN, {"provider": "flash-attn-4", "version": 4}, {}),
    "TestFA4OnBlackwell": (FLASH_ATTN, {"provider": "flash-attn-4"}, {"gate_device": "b200", "num_configs": 30}),
    "TestVllmFA4": (FLASH_ATTN, {"provider": "vllm", "version": 4}, FEW),
    "TestVllmMLA": (FLASH_ATTN_MLA, {"provider": "vllm"}, {}),
    "TestUpstreamMLA": (FLASH_ATTN_MLA, {"provider": "flash-attn-3"}, FEW),
    # Prefill; decode is FA3's.
    "TestFA4MLA": (FLASH_ATTN_MLA, {"provider": "flash-attn-4"}, {**FEW, "gate_device": "b200"}),
    "TestSglKernelMLA": (FLASH_ATTN_MLA, {"provider": "sgl-kernel"}, FEW),
    "TestVllmMLASparse": (FLASH_ATTN_MLA_SPARSE, {"provider": "vllm"}, {}),
    "TestUpstreamMLASparse": (FLASH_ATTN_MLA_SPARSE, {"provider": "flash-attn-3"}, FEW),
    "TestSglKernelMLASparse": (FLASH_ATTN_MLA_SPARSE, {"provider": "sgl-kernel"}, FEW),
}
for _name, (_spec, _options, _fields) in SUITES.items():
    globals()[_name] = type(_name, (Emulated,), {"spec": _spec, "options": _options, **_fields})


class TestGatheredMLASparse(Emulated):
    """FA4 on Blackwell."""

    spec = FLASH_ATTN_MLA_SPARSE
    gate_device = "b200"
    heads = ((8, 8), (16, 16), (64, 64))
    num_configs = 200  # one of ten asks for what it takes
    options: ClassVar[Mapping[str, Any]] = {"provider": "vllm"}

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[[str], Any]) -> None:
        emulate("vllm with FA4")


@pytest.mark.parametrize("nan_tails", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"num_heads": 4, "batch_invariant": True, "num_speculative_tokens": 3},  # failed with NaN on an H200
        {"num_heads": 80, "block_size": 32},
    ],
    ids=str,
)
def test_nan_in_a_page_that_is_loaded_whole(
    fields: dict[str, Any], nan_tails: bool, emulate: Callable[[str], Any]
) -> None:
    """A NaN behind a request's end reaches its result exactly where the plan says that it may."""
    emulate("vllm")
    selection = selection_of(FLASH_ATTN_MLA, mla_layer(**fields), options={"provider": "vllm"})
    rig = Rig(selection, torch.device("cpu"), 185)
    safe = selection.plans["decode"].nan_tail_safe
    assert rig.batches.nan_tails is safe
    rig.batches.nan_tails = nan_tails
    if nan_tails and not safe:
        with pytest.raises(AssertionError, match="holds NaN or infinity"):
            rig.check_batches()
    else:
        rig.check_batches()


def here() -> Environment | None:
    """This machine's libraries; kernels of vLLM that lie in a folder, without metadata, count as vLLM's 0.26.0."""
    bare = installed_version("vllm") is None and importlib.util.find_spec("vllm") is not None
    return Environment(pins={"vllm": "0.26.0"}) if bare else None


class Real(Suite):
    device = "cuda"
    environment = here()


@pytest.mark.gpu
class TestFlashAttn(Real):
    spec = FLASH_ATTN
    max_compile_keys = 1  # FA2 on Hopper compiles for a minute per kernel


def fa4_kernels(config: AttentionConfig) -> tuple[Any, ...]:
    """Return what CuTe DSL compiles FA4 for, as far as a layer says it."""
    features = (config.sliding_window is not None, config.logits_soft_cap, config.sinks, config.has_cache)
    sizes = (config.dtype, config.head_size, config.value_head_size, config.num_heads // config.num_kv_heads)
    return (*sizes, config.attn_type, config.non_causal, *features)


@pytest.mark.gpu
class TestFlashAttn4(Real):
    """FA4 where flash-attn-4 is installed: the kernels that ``layers`` need, each of which takes seconds to compile."""

    spec = replace(FLASH_ATTN, compile_key=fa4_kernels)
    options: ClassVar[Mapping[str, Any]] = {"provider": "flash-attn-4", "version": 4}
    heads = ((8, 2), (4, 4))
    layers: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"sliding_window": 33},
        {"head_size": 64, "sinks": True},
        {"logits_soft_cap": 30.0},
        {"head_size": 64, "num_kv_heads": 8, "dtype": "float16"},
        {"head_size": 192, "v_head_size": 128},
        {"head_size": 256},
        {"attn_type": "encoder_only"},
    )
    max_compile_keys = len(layers)

    def _with_few_keys(self, case: Case) -> Case:
        if not self._compiled:
            for fields in self.layers:
                config = AttentionConfig(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 128, **fields})
                self._compiled[self.spec.compile_key(config)] = config
        return super()._with_few_keys(case)


@pytest.mark.gpu
class TestFlashAttnMLA(Real):
    spec = FLASH_ATTN_MLA


@pytest.mark.gpu
class TestFlashAttnMLASparse(Real):
    spec = FLASH_ATTN_MLA_SPARSE
    num_configs = 60


@pytest.mark.gpu
@pytest.mark.slow(guard="TestVllmFA2 and TestUpstreamFA2")
@pytest.mark.parametrize("fields", [{"alibi": True}, {"logits_soft_cap": 30.0}], ids=str)
def test_fa2_in_two_compilations(fields: dict[str, Any]) -> None:
    """On Hopper the driver compiles FA2 for a minute per head size, dtype and causality: so these two and no more."""
    config = AttentionConfig(num_heads=8, num_kv_heads=2, head_size=128, block_size=16, **fields)
    device, options = detect_device().device, FLASH_ATTN.options(version=2)
    environment = here() or environment_for(device)
    found = outcomes(FLASH_ATTN, config, device, environment, options)
    plans = plans_of(found)
    if not plans:
        pytest.skip(str(found))
    selection = selection_for(FLASH_ATTN, plans, config, device, environment, options)
    assert selection is not None
    try:
        rig = Rig(selection, torch.device("cuda"), 0)
    except ImportError as error:
        pytest.skip(str(error))
    assert rig.check_batches() == 2
    assert Rig(selection, torch.device("cuda"), 0, cuda_graphs=True).check_graphs() > 0
