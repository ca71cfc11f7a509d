"""FLASHINFER's cascade: planned in two parts, merged to what the plain path gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_groups as groups
import torch

from attn_select.reference.running import random_batch
from attn_select.runtime import Attention, Scales
from attn_select_flashinfer.runtime.mha_calls import Cascade

Emulate = Callable[..., Any]
NATIVE = {"use_trtllm": False}
MIB = 1 << 20
LSE = 2e-3
E4M3 = torch.float8_e4m3fn
PREFILL_RUN = "BatchPrefillWithPagedKVCacheWrapper.run"
DECODE_RUN = "BatchDecodeWithPagedKVCacheWrapper.run"


def parts_of(metadata: Any) -> list[Any]:
    return metadata.parts[0].metadata  # type: ignore[no-any-return]


@pytest.mark.parametrize("fields", [{}, {"kv_cache_dtype": "fp8_e4m3"}, {"sinks": True}], ids=str)
def test_cascade_gives_what_the_plain_path_gives(
    fields: dict[str, Any], emulate: Emulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = emulate()
    monkeypatch.setattr("attn_select_flashinfer.runtime.mha.FlashInferMetadataBuilder.least_cascade_bytes", 0)
    group = groups.made(options=NATIVE, block_size=16, **fields)
    sinks: dict[str, Any] = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.25])} if "sinks" in fields else {}
    layer = Attention(group, caller_writes=True, scale=0.2, scales=Scales.make("cpu", q=0.02, k=0.5, v=0.25), **sinks)
    common, cache = random_batch(group, [1] * 7 + [20], [300 + i for i in range(8)], 16)
    metadata = group.build(common, 256)
    (part,) = parts_of(metadata)
    assert isinstance(part, Cascade)
    rest, prefix = world.named("BatchPrefillWithPagedKVCacheWrapper.plan")
    assert prefix["paged_kv_indices"].tolist() == common.block_table_tensor[0, :16].tolist()
    assert rest["seq_lens"].tolist() == [44 + i for i in range(8)]
    assert (prefix["causal"], rest["causal"]) == (False, True)
    expected, expected_lse = groups.reference(group, common, cache, layer, **sinks)
    output, lse = groups.run(group, common, cache, layer, common_prefix_len=256)
    torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=LSE, rtol=0)
    assert len(world.named("merge_state_in_place")) == 1


def test_cascade_needs_native_decode_and_enough_to_save(emulate: Emulate) -> None:
    emulate()
    for options, prefix, wanted in ((NATIVE, 512, False), (NATIVE, 32768, True), ({}, 32768, False)):
        group = groups.made(options=options, num_heads=32, num_kv_heads=8, head_size=128)
        common, _ = random_batch(group, [1] * 8, [1000] * 8)
        assert groups.builder_of(group).use_cascade_attention(prefix, common) == wanted
