"""FlashInfer's backends of layers that keep a state run what their specs promise: by emulated entries,
on a GPU by FlashInfer's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flashinfer_emulated as fi
import pytest

from attn_select import select
from attn_select.backends.spec import BackendSpec
from attn_select.decide import gate
from attn_select.layer.config import Phase
from attn_select.layer.state import StateConfig
from attn_select.machine.device import lookup
from attn_select.testing.state_conformance import StateConformance
from attn_select.testing.toolkit import environment_of, selection_of
from attn_select_flashinfer.facts.states import FLASHINFER_GDN, FLASHINFER_KDA, FLASHINFER_MAMBA, RATIOS

QWEN3_NEXT = StateConfig(recurrence="gated_delta_net", num_heads=16, num_v_heads=32, head_size=128, conv_kernel_size=4)


class Emulated(StateConformance):
    """Few and short, since the reference goes token by token over states of 128 times 128."""

    spec = FLASHINFER_GDN
    gate_device = lookup("h100")
    environment = environment_of()
    num_configs = 6
    steps = 4
    longest = 30
    release = fi.RELEASES[1]

    @pytest.fixture(autouse=True)
    def _emulated(self, emulate: Callable[..., Any]) -> None:
        emulate((9, 0), release=self.release)


class GdnLayers(StateConformance):
    def takes(self, config: StateConfig) -> bool:
        return config.state_dtype != "bfloat16" or config.dtype == "bfloat16"


class TestGdn(GdnLayers, Emulated):
    pass


def test_decodes_with_states_in_bfloat16_take_no_float16() -> None:
    """Their kernel would read it as bfloat16."""
    layer = StateConfig(
        recurrence="gated_delta_net", num_heads=16, head_size=128, dtype="float16", state_dtype="bfloat16"
    )
    found = gate.check(FLASHINFER_GDN, layer, lookup("h200"), environment_of(), FLASHINFER_GDN.options(), "decode")
    assert isinstance(found, list)
    assert [reason.code for reason in found] == ["dtype"]
    found = gate.check(FLASHINFER_GDN, layer, lookup("h200"), environment_of(), FLASHINFER_GDN.options(), "prefill")
    assert not isinstance(found, list)


def of_one_phase(spec: BackendSpec, phase: Phase) -> BackendSpec:
    """Return a backend of one phase, where the phases share no layer."""
    return replace(spec, capabilities={phase: spec.capabilities[phase]})


class TestKda(Emulated):
    spec = FLASHINFER_KDA
    gate_device = lookup("b200")


class TestKdaDecodes(TestKda):
    spec = of_one_phase(FLASHINFER_KDA, "decode")

    def takes(self, config: StateConfig) -> bool:
        return config.v_head_size == config.head_size


class MambaLayers(StateConformance):
    spec = of_one_phase(FLASHINFER_MAMBA, "decode")

    def takes(self, config: StateConfig) -> bool:
        return config.num_v_heads // config.num_heads in RATIOS.value


class TestMamba(MambaLayers, Emulated):
    pass


class TestMambaOnB200(MambaLayers, Emulated):
    spec = FLASHINFER_MAMBA
    gate_device = lookup("b200")
    longest = 300
    """More than two chunks."""


def test_pieces_begin_with_requests_and_with_chunks() -> None:
    torch = pytest.importorskip("torch")
    from attn_select_flashinfer.runtime.states import segments

    request, chunk, offset = segments(torch.tensor([0, 5, 128, 300], dtype=torch.int32))
    assert request.tolist() == [0] * 5 + [1] * 123 + [2] * 172
    assert [*zip(chunk.tolist(), offset.tolist(), strict=True)] == [(0, 0), (0, 5), (1, 0), (2, 0)]
    assert chunk.dtype is offset.dtype is request.dtype is torch.int32


@pytest.mark.parametrize(
    ("spec", "layer", "least"),
    [
        (FLASHINFER_KDA, StateConfig(recurrence="kda", num_heads=2, head_size=128, state_dtype="bfloat16"), -3000),
        (
            FLASHINFER_MAMBA,
            StateConfig(recurrence="mamba2", num_heads=2, head_size=128, v_head_size=64, state_dtype="float32"),
            -400,
        ),
    ],
)
def test_prefills_name_decays_that_they_cannot_compute(
    monkeypatch: pytest.MonkeyPatch, emulate: Callable[..., Any], spec: BackendSpec, layer: StateConfig, least: int
) -> None:
    torch = pytest.importorskip("torch")
    from attn_select.runtime import BatchError, prepare_batch
    from attn_select.runtime.states import Gates, LinearAttention, RawGates, StateGroup, StatePool

    emulate((10, 0), release=fi.RELEASES[1])
    monkeypatch.setenv("ATTN_SELECT_CHECK", "1")
    group = StateGroup(selection_of(spec, layer, lookup("b200"), environment=environment_of()), "cpu")
    linear, cache, pool = LinearAttention(group), group.allocate(4), StatePool(4)
    width = (128,) if layer.recurrence == "kda" else ()
    channels = torch.randn(5, layer.width).bfloat16()
    for name, largest in (("within", -least * 0.9), ("beyond", -least * 1.1)):
        pool.add(name)
        a = torch.randn(5, 2, *width).bfloat16()
        a[2] = largest  # softplus of it is the number itself, and A is -1
        raw = RawGates(
            A_log=torch.zeros(2),
            a=a,
            dt_bias=torch.zeros(2, *width),
            b=None if layer.recurrence == "mamba2" else torch.randn(5, 2).bfloat16(),
        )
        metadata = group.build(prepare_batch([5], [5]), pool.step({name: 5}))
        if name == "within":
            assert linear(channels, Gates(raw=raw), cache, metadata).isfinite().all()
            continue
        with pytest.raises(BatchError, match=f"in prefill: {spec.name} loses digits below {least}"):
            linear(channels, Gates(raw=raw), cache, metadata)


def test_backends_are_timed_on_the_memory_that_one_of_them_made(emulate: Callable[..., Any]) -> None:
    """Also one that needs slots behind the requests': ``TORCH_STATE`` needs none."""
    from attn_select.reference.timed_steps import StateStep
    from attn_select_torch.facts.torch_state import TORCH_STATE

    emulate((9, 0), release=fi.RELEASES[1])
    made = [selection_of(spec, QWEN3_NEXT, lookup("h200")) for spec in (TORCH_STATE, FLASHINFER_GDN)]
    torch_step, gdn_step = (StateStep(each, [(1, 9), (1, 5)], device="cpu") for each in made)
    gdn_step.make_layers(torch_step.memory(0, 1).caches(gdn_step))
    gdn_step.calls()[0]()
    assert gdn_step.error() < gdn_step.bound({})


@pytest.mark.gpu
class TestMambaOnGpu(MambaLayers):
    device = "cuda"
    num_configs = 60


@pytest.mark.gpu
class TestGdnOnGpu(GdnLayers):
    spec = FLASHINFER_GDN
    device = "cuda"
    num_configs = 60


def test_it_prefills_on_hopper_beside_a_decode_in_its_layout() -> None:
    selection = select(QWEN3_NEXT, "h100")
    assert selection.selected == {"prefill": "FLASHINFER_GDN", "decode": "TRITON_STATE"}
    assert selection.kv_layout == "STATE_VK"
    assert selection.cache_shape == ["num_slots", 32, 128, 128]
