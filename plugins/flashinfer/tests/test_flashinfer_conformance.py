"""FLASHINFER runs what its spec promises: emulated on a CPU for three devices, by the real kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from attn_select.layer.config import AttentionConfig
from attn_select.machine.environment import Environment
from attn_select_flashinfer.facts.libraries import pages
from attn_select_flashinfer.facts.mha import FLASHINFER
from attn_select_flashinfer.facts.mha_kernels import XQA_PAGES

pytest.importorskip("torch")


from attn_select.testing import BackendConformance
from attn_select.testing.conformance_configs import Case

NATIVE = {"use_trtllm": False}


class Emulated(BackendConformance):
    """The kernels of 0.6.14, for which all facts are: one full suite, fewer configurations for further kernels."""

    spec = FLASHINFER
    device = "cpu"
    gate_device = "h100"
    num_configs = 100
    max_compile_keys = 1000
    environment = Environment(assume_installed=True, pins={"flashinfer-python": "0.6.14"})
    capability: ClassVar[tuple[int, int]] = (9, 0)
    release: ClassVar[str] = "0.6.14"

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[..., Any]) -> None:
        emulate(self.capability, release=self.release)


SINCE_07 = Environment(assume_installed=True, pins={"flashinfer-python": "0.7.2.post1"})
B200: dict[str, Any] = {"gate_device": "b200", "capability": (10, 0)}
SUITES: dict[str, dict[str, Any]] = {
    # XQA decode where it runs, fa3 prefill.
    "TestHopper": {},
    # fa2 decode.
    "TestHopperNative": {"seed": 1, "num_configs": 40, "options": NATIVE},
    "TestAmpere": {"seed": 2, "num_configs": 10, "gate_device": "a100", "capability": (8, 0)},
    # Half precision alone, with a release that was repaired for it.
    "TestTuring": {"seed": 5, "num_configs": 60, "gate_device": "t4", "capability": (7, 5), "environment": SINCE_07},
    # trtllm-gen in both phases where it runs.
    "TestBlackwell": {**B200, "seed": 3, "num_configs": 40},
    "TestBlackwellNative": {**B200, "seed": 4, "num_configs": 10, "options": NATIVE},
    # Decodes alone: that is all that the option changes.
    "TestCuteDslOnB200": {
        **B200,
        "release": "0.7.2.post1",
        "environment": SINCE_07,
        "seed": 6,
        "spec": replace(FLASHINFER, capabilities={"decode": FLASHINFER.capabilities["decode"]}),
        "options": {"decode_kernel": "cute-dsl"},
    },
}
for _name, _given in SUITES.items():
    globals()[_name] = type(_name, (Emulated,), _given)


def native_modules(config: AttentionConfig) -> tuple[Any, ...]:
    """Return what native modules are compiled for."""
    features = (config.sliding_window is not None, config.logits_soft_cap is not None, config.sinks)
    return (config.dtype, config.cache_dtype, config.head_size, *features)


def all_modules(config: AttentionConfig) -> tuple[Any, ...]:
    """Return what XQA is compiled for beside that: the group, the page, the drafts and the output."""
    page = next(iter(pages(XQA_PAGES, config.block_size)), None)
    own = config.block_size if config.block_size in XQA_PAGES else page
    group = config.num_heads // config.num_kv_heads
    return (*native_modules(config), group, own, config.num_speculative_tokens, config.output_quantization)


class Real(BackendConformance):
    """The kernels on this machine, of the modules that ``layers`` need: each compiles for half a minute to two."""

    num_configs = 200
    layers: ClassVar[tuple[dict[str, Any], ...]] = ()
    device = "cuda"

    def _with_few_keys(self, case: Case) -> Case:
        if not self._compiled:
            for fields in self.layers:
                config = AttentionConfig(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 128, **fields})
                self._compiled[self.spec.compile_key(config)] = config
        return super()._with_few_keys(case)


@pytest.mark.gpu
class TestNative(Real):
    spec = replace(FLASHINFER, compile_key=native_modules)
    options = NATIVE
    layers = (
        {},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e4m3", "sliding_window": 33},
        {"head_size": 64},
        {"head_size": 64, "sliding_window": 33},
        {"head_size": 64, "sinks": True},
        {"head_size": 64, "kv_cache_dtype": "fp8_e5m2"},
        {"dtype": "float16", "logits_soft_cap": 30.0},
    )
    max_compile_keys = len(layers)


@pytest.mark.gpu
class TestNativeFA2(TestNative):
    """Prefill too: of the same modules as decode."""

    options: ClassVar[dict[str, Any]] = {**NATIVE, "prefill_kernel": "fa2"}


@pytest.mark.gpu
class TestXqa(Real):
    spec = replace(FLASHINFER, compile_key=all_modules)
    heads = ((4, 1), (8, 2))
    layers = (
        {"block_size": 16},
        {"block_size": 16, "kv_cache_dtype": "fp8_e4m3"},
        {"block_size": 16, "num_speculative_tokens": 1},
        {"block_size": 32, "head_size": 64, "sliding_window": 33},
        {"block_size": 64, "head_size": 64, "sinks": True},
        {"block_size": 16, "kv_cache_dtype": "fp8_e4m3", "output_quantization": "fp8"},
    )
    max_compile_keys = len(layers)
