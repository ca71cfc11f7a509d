"""What the plans rest on is true of the FlashInfer that is installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from attn_select_flashinfer.runtime import library

flashinfer: Any = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")


def test_every_entry_takes_what_this_plugin_passes() -> None:
    library.flashinfer.cache_clear()
    library.flashinfer().check(*library.PARAMETERS)


def test_the_ends_that_the_facts_name() -> None:
    core = importlib.import_module("flashinfer.mla._core")
    assert core._TRTLLM_GEN_MLA_MAX_BATCH == 8192
    dims = {(each.kv_lora_rank, each.qk_rope_head_dim) for each in core.supported_mla_head_dimensions}
    assert {(512, 64), (256, 64)} <= dims
