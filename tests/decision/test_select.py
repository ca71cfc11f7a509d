"""The public functions, on the real facts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import attn_select
from attn_select import AttentionConfig, ConfigError, NoBackendError, clear_cache, select, select_model
from attn_select.errors import UnknownNameError

GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)


def test_selections_are_cached_by_identity_and_by_value() -> None:
    first = select(GQA, "h100")
    assert select(GQA, "h100") is first
    assert select(GQA.model_copy(), "h100") is first
    assert select(GQA, "b200") is not first
    clear_cache()
    assert select(GQA, "h100") is not first
    assert select(GQA, "h100").selected == first.selected


def test_arguments_that_change_under_one_identity_are_read_again(tmp_path: Path) -> None:
    backend = ["TRITON_ATTN"]
    assert select(GQA, "h100", backend=backend).selected["decode"] == "TRITON_ATTN"
    backend[0] = "FLASHINFER"
    assert select(GQA, "h100", backend=backend).selected["decode"] == "FLASHINFER"


def test_loading_what_cannot_run_raises_with_every_reason() -> None:
    selection = select(GQA, "t4", backend="FLASH_ATTN")
    assert not selection.ok
    with pytest.raises(NoBackendError, match=r"compute capability 7\.5") as caught:
        selection.load()
    assert caught.value.selection is selection


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_loading_imports_the_kernel_library_and_selecting_does_not() -> None:
    selection = select(GQA, "h100", backend="FLASHINFER")
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        selection.load()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (({"num_heads": 4}, "h100"), ConfigError, "expected an AttentionConfig"),
        ((GQA, 5), ConfigError, "device = 5"),
        ((GQA, "h1000"), UnknownNameError, "h100"),
        ((GQA, "h100", None, 5), ConfigError, "backend = 5"),
        ((GQA, "h100", None, "FLASHATTN"), UnknownNameError, "FLASH_ATTN"),
    ],
)
def test_wrong_arguments_are_documented_errors(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        select(*arguments)


def test_auto_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    clear_cache()
    assert select(GQA, "auto").device == select(GQA).device
    assert select(GQA).device.is_cpu


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h100", "b200", "rtx5090"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_kinds_of_one_pool_agree_on_layout_and_block_size(gpu: str, cache: str) -> None:
    fields: dict[str, Any] = {"num_heads": 20, "num_kv_heads": 20, "head_size": 64, "kv_cache_dtype": cache}
    kinds = [{}, {"attn_type": "encoder_decoder"}, {"sliding_window": 128}, {"sinks": True}]
    selections = select_model([AttentionConfig(**fields, **kind) for kind in kinds], gpu)
    if all(selection.ok for selection in selections):
        assert len({(s.kv_layout, s.block_size) for s in selections}) == 1


def test_every_public_name_can_be_had() -> None:
    for name in attn_select.__all__:
        assert getattr(attn_select, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = attn_select.no_such_name  # type: ignore[attr-defined]
