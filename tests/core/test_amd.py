"""AMD's GPUs: an arch in place of a compute capability, and the rows that say what may run there."""

from __future__ import annotations

import pytest

from attn_select.decide.condition_reasons import reasons_against
from attn_select.decide.selector import select
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import CPU, known_gpus, lookup
from attn_select.rules.conditions import compile_when
from attn_select.rules.predicates import ConditionError
from attn_select.rules.ranking import holds_on

PLAIN = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
MLA = {"num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LAYERS = (PLAIN, {**PLAIN, "sinks": True, "sliding_window": 128}, MLA, {**MLA, "sparse_top_k": 2048})


@pytest.mark.parametrize("gpu", ["mi210", "mi300x", "mi355x", "rx9070xt"])
@pytest.mark.parametrize("layer", LAYERS)
def test_what_runs_is_unverified_and_the_rest_says_that_it_needs_another_gpu(layer: dict[str, int], gpu: str) -> None:
    found = select(AttentionConfig(**layer), gpu)
    assert None not in found.selected.values()
    for candidate in found.candidates:
        for verdict in candidate.phases.values():
            codes = {reason.code for reason in verdict.reasons}
            assert "plugin-error" not in codes
            assert verdict.plan is None or verdict.plan.unverified


def test_fp8_is_refused_where_its_kernels_do_not_compile() -> None:
    found = select(AttentionConfig(**PLAIN, kv_cache_dtype="fp8_e4m3"), "mi300x")
    assert [reason.code for reason in found.verdict("TRITON_ATTN", "decode").reasons] == ["kv-cache-dtype"]


@pytest.mark.parametrize("written", ["9.x", "9.4", ">=0.0", "!=10.x"])
def test_rules_of_compute_capabilities_never_match_amd(written: str) -> None:
    ((condition,), _) = compile_when({"compute_capability": written})
    assert not any(holds_on(condition, device) for device in (*known_gpus().values(), CPU) if device.arch)


@pytest.mark.parametrize(("written", "names"), [("gfx942", {"mi300x", "mi325x"}), ("gfx11*", {"rx7900xtx"})])
def test_rules_match_an_arch(written: str, names: set[str]) -> None:
    ((condition,), _) = compile_when({"arch": written})
    assert {device.name for device in (*known_gpus().values(), CPU) if holds_on(condition, device)} == names


@pytest.mark.parametrize("written", ["942", ">=gfx9", "", 9.4])
def test_an_arch_that_is_none(written: object) -> None:
    with pytest.raises(ConditionError, match="gfx942"):
        compile_when({"arch": written})


@pytest.mark.parametrize(
    ("when", "layer", "gpu", "codes"),
    [
        ({"mla": False, "arch": "gfx942", "head_size": [64, 128]}, PLAIN, "mi300x", []),
        ({"mla": False, "arch": "gfx942", "head_size": 64}, PLAIN, "h100", ["compute-capability", "head-size"]),
        ({"arch": "gfx942", "compute_capability": "9.x"}, PLAIN, "b200", ["compute-capability"]),
        ({"mla": True}, PLAIN, "h100", ["mla-only"]),
        ({"sparse": True}, MLA, "h100", ["sparse-only"]),
        ({"sparse": False}, {**MLA, "sparse_top_k": 2048}, "h100", ["sparse-unsupported"]),
        ({"sinks": False, "sliding_window": "none"}, {**PLAIN, "sinks": True, "sliding_window": 9}, "h100",
         ["sinks", "sliding-window"]),
        ({"kv_cache_dtype": "fp8*"}, PLAIN, "h100", ["kv-cache-dtype"]),
    ],
)  # fmt: skip
def test_conditions_become_reasons(when: dict[str, object], layer: dict[str, int], gpu: str, codes: list[str]) -> None:
    found = reasons_against(compile_when(when)[0], AttentionConfig(**layer), lookup(gpu))
    assert [reason.code for reason in found] == codes


def test_a_selection_for_one_arch_does_not_run_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from attn_select.runtime.loaded_backend import device_of

    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, found in {"is_available": True, "current_device": 0, "get_device_name": "AMD Instinct MI355X"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    properties = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert device_of(select(AttentionConfig(**PLAIN), "mi355x"), None).type == "cuda"
    with pytest.raises(ConfigError, match=r"mi300x \(gfx942\).* \(gfx950\)"):
        device_of(select(AttentionConfig(**PLAIN), "mi300x"), None)
