"""Compiling kernels before the layers that launch them are there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attn_select import AttentionConfig, select  # noqa: E402
from attn_select.runtime import Capacity  # noqa: E402
from attn_select.runtime.compile_ahead import compile_ahead, compile_in_an_engine  # noqa: E402

CPU, CAPACITY = torch.device("cpu"), Capacity(4, 64, 128)
FIELDS: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens while ``TORCH_SDPA`` and ``TORCH_MLA`` pretend to compile: contexts, and steps within."""
    from attn_select_torch.runtime.mla import TorchMLABackend
    from attn_select_torch.runtime.sdpa import SDPABackend

    seen: list[str] = []

    @contextmanager
    def compiling(progress: Callable[..., None]) -> Iterator[None]:
        seen.append("begin")
        yield
        progress("kernel", 1, 2)
        progress("kernel", 2, 2)
        seen.append("end")

    for backend in (SDPABackend, TorchMLABackend):
        monkeypatch.setattr(backend, "compiling", compiling)
        for part in {backend.impl_cls, backend.builder_cls}:
            made = part.__init__

            def counted(self: Any, *given: Any, made: Any = made, part: Any = part, **options: Any) -> None:
                seen.append(part.__name__)
                made(self, *given, **options)

            monkeypatch.setattr(part, "__init__", counted)
    return seen


def test_all_layers_are_compiled_side_by_side(contexts: list[str]) -> None:
    asked = [FIELDS, FIELDS | {"sinks": True, "alibi": True}, FIELDS | {"num_speculative_tokens": 3}]
    done = compile_ahead([select(AttentionConfig(**fields), "cpu") for fields in asked], CPU, CAPACITY)
    assert [each for each in contexts if each in ("begin", "end")] == ["begin", "end"]
    assert (done.kernels, done.steps) == (2, 0)


def test_where_nothing_is_compiled_no_group_is_made(contexts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_select_torch.runtime.sdpa import SDPABackend

    monkeypatch.setattr(SDPABackend, "compiling", None)
    assert compile_ahead([select(AttentionConfig(**FIELDS), "cpu")], CPU, CAPACITY).kernels == 0
    assert contexts == []


LOGGER = logging.getLogger("attn_select_test_engine")


def test_an_engine_compiles_a_kind_of_layers_once(contexts: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", LOGGER.name)
    layer = select(AttentionConfig(**FIELDS, logits_soft_cap=21.0), "cpu")
    shared = select(AttentionConfig(num_heads=4, dtype="float32", decode_context_parallel_size=2, **LATENT), "cpu")
    for _ in range(2):
        compile_in_an_engine([layer, layer, shared], CPU, CAPACITY, cuda_graphs=False, logger=LOGGER)
    assert [each for each in contexts if each in ("begin", "end")] == ["begin", "end"]
    (record,) = caplog.records
    assert (record.levelname, record.args[0]) == ("INFO", 2)  # type: ignore[index]


def test_an_engine_starts_where_nothing_can_be_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from attn_select_torch.runtime.sdpa import SDPABackend

    @contextmanager
    def compiling(progress: Any) -> Iterator[None]:
        raise RuntimeError("ptxas is missing")
        yield

    monkeypatch.setattr(SDPABackend, "compiling", compiling)
    layer = select(AttentionConfig(**FIELDS, logits_soft_cap=22.0), "cpu")
    compile_in_an_engine([layer], CPU, CAPACITY, cuda_graphs=False, logger=LOGGER)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith(": ptxas is missing")
