"""FLASH_ATTN_MLA's builder and layer: decode on the latent cache, prefill on packed keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_select.reference.running import impl_of
from attn_select.runtime import Outputs, Terms

pytest.importorskip("torch")

import flash_attn_layers as layers
import torch

from attn_select.reference.oracle import attention_reference
from attn_select.reference.running import random_batch
from attn_select.runtime import Capacity, VarlenMetadata
from attn_select.runtime.backend import BackendContext
from attn_select.testing import mla_layer, plan_of, selection_of
from attn_select_flash_attn.facts.flash_attn_mla import FLASH_ATTN_MLA

Emulate = Callable[[str], list[dict[str, Any]]]
DECODE = ["vllm", "flash-attn-3", "sglang-kernel", "sgl-kernel"]
PREFILL = [*((p, "h100") for p in DECODE), ("vllm", "a100"), ("flash-attn", "a100")]
RANK, ROPE, QK, V = 512, 64, 192, 128
LSE = 2e-3


def decoder(provider: str, **options: Any) -> tuple[Any, Any, Any]:
    """Return group, builder and impl of decode."""
    names = ("batch_invariant", "block_size", "qk_rope_head_dim")
    fields = {name: options.pop(name) for name in names if name in options}
    selection = selection_of(FLASH_ATTN_MLA, mla_layer(num_heads=4, **fields), options={"provider": provider})
    group = layers.group_of(selection, **options)
    served = group.backends["decode"]
    return group, served.builder, impl_of(served, scale=QK**-0.5)


def prefiller(provider: str, gpu: str, **fields: Any) -> tuple[Any, Any]:
    """Return builder and impl of prefill."""
    spec = FLASH_ATTN_MLA
    config = mla_layer(num_heads=4, **fields)
    options = spec.options(provider=provider)
    plan = plan_of(spec, config, gpu, "prefill", options={"provider": provider})
    context = BackendContext(
        config=config,
        plans={"prefill": plan},
        device=torch.device("cpu"),
        options=options,
        kv_layout=None,
        block_size=None,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=1024,
    )
    backend = spec.get_class()
    return backend.builder_cls(context), backend.impl_cls(context, Terms.of(config, context.device, scale=QK**-0.5))


@pytest.mark.parametrize("provider", DECODE)
@pytest.mark.parametrize("block_size", [1, 64])
def test_decode_reads_latent_and_rope_part_as_views(provider: str, block_size: int, emulate: Emulate) -> None:
    calls = emulate(provider)
    group, builder, impl = decoder(provider, block_size=block_size)
    common, cache = random_batch(group, [1, 3, 1], [70, 5, 1])
    query = torch.randn(8, 4, RANK + ROPE).bfloat16()
    output, lse = torch.full((8, 4, RANK), torch.nan).bfloat16(), torch.full((8, 4), torch.nan)
    impl.forward_mqa(query, cache, builder.build(0, common), Outputs(output, lse))
    assert output[5:].isnan().all()
    assert lse[5:].isnan().all()
    call = calls[-1]
    key, value = (call["k"], call["v"]) if provider == "vllm" else (call["k_cache"], call["v_cache"])
    assert (key.shape[2:], value.shape[2:]) == ((1, ROPE), (1, RANK))
    assert value.data_ptr() == cache.data_ptr()
    assert key.data_ptr() == cache[..., RANK:].data_ptr()
    bounds = common.query_start_loc.tolist()
    for request in range(3):
        length, rows = int(common.seq_lens[request]), slice(bounds[request], bounds[request + 1])
        table = common.block_table_tensor[request, : -(-length // block_size)].long()
        latents = cache[table].flatten(0, 1)[:length].unsqueeze(1)
        wanted, wanted_lse = attention_reference(query[rows], latents, latents[..., :RANK], scale=QK**-0.5)
        torch.testing.assert_close(output[rows].double(), wanted, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse[rows].double(), wanted_lse, atol=LSE, rtol=0)


@pytest.mark.parametrize("provider", DECODE)
def test_decode_takes_the_query_in_two_parts(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    group, builder, impl = decoder(provider)
    common, cache = random_batch(group, [1, 3, 1], [70, 5, 1])
    assert impl.takes_query_parts
    latent = torch.randn(4, 8, RANK).bfloat16().transpose(0, 1)
    rope = torch.randn(8, 4, 2 * ROPE).bfloat16()[..., ROPE:]
    outputs = torch.full((2, 8, 4, RANK), torch.nan).bfloat16()
    for query, output in zip(((latent, rope), torch.cat((latent, rope), -1)), outputs, strict=True):
        impl.forward_mqa(query, cache, builder.build(0, common), Outputs(output))
    assert torch.equal(outputs[0, :5], outputs[1, :5])
    assert outputs[0, 5:].isnan().all()
    call = next(call for call in calls if call["function"] != "get_scheduler_metadata")
    assert {each.data_ptr() for each in call.values() if torch.is_tensor(each)} >= {latent.data_ptr(), rope.data_ptr()}


def test_a_query_without_a_rope_part_is_taken_whole(emulate: Emulate) -> None:
    emulate("vllm")
    assert not decoder("vllm", qk_rope_head_dim=0)[2].takes_query_parts


def test_decodes_schedule_is_that_of_rope_and_latent(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group, builder, impl = decoder("vllm", cuda_graphs=True, capacity=Capacity(8, 64, 256))
    for seq_lens in ([70, 5], [9, 200]):
        common, cache = random_batch(group, [1, 1], seq_lens)
        query, output = torch.randn(2, 4, RANK + ROPE).bfloat16(), torch.empty(2, 4, RANK).bfloat16()
        impl.forward_mqa(query, cache, builder.build(0, common), Outputs(output))
    scheduled = [call for call in calls if call["function"] == "get_scheduler_metadata"]
    assert [(c["num_heads_kv"], c["headdim"], c["headdim_v"]) for c in scheduled] == [(1, ROPE, RANK)] * 2
    attended = [call for call in calls if call["function"] != "get_scheduler_metadata"]
    assert attended[0]["scheduler_metadata"].data_ptr() == attended[1]["scheduler_metadata"].data_ptr()
    assert attended[0]["max_seqlen_k"] == attended[1]["max_seqlen_k"] == 256
    assert attended[0]["num_splits"] == 32


def test_batch_invariant_decode_does_not_split(emulate: Emulate) -> None:
    calls = emulate("vllm")
    group, builder, impl = decoder("vllm", batch_invariant=True)
    common, cache = random_batch(group, [1], [70])
    query, output = torch.randn(1, 4, RANK + ROPE).bfloat16(), torch.empty(1, 4, RANK).bfloat16()
    impl.forward_mqa(query, cache, builder.build(0, common), Outputs(output))
    (call,) = calls
    assert call["num_splits"] == 1
    assert call["max_seqlen_q"] == group.capacity.max_num_batched_tokens
    assert not builder.use_cascade_attention(4096, common)


def varlen(query_lens: list[int], key_lens: list[int], causal: bool) -> VarlenMetadata:
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, key_lens)]
    offsets = torch.tensor([0 if causal else k for k in key_lens], dtype=torch.int32)
    return VarlenMetadata(
        query_start_loc=starts[0],
        query_start_loc_cpu=starts[0],
        key_start_loc=starts[1],
        key_start_loc_cpu=starts[1],
        max_query_len=max(query_lens),
        max_key_len=max(key_lens),
        causal=causal,
        query_offsets_cpu=offsets,
        counts_sinks=causal,
    )


@pytest.mark.parametrize("provider", DECODE)
def test_batch_invariant_prefill_has_fixed_bounds(provider: str, emulate: Emulate) -> None:
    calls = emulate(provider)
    builder, impl = prefiller(provider, "h100", batch_invariant=True)
    for lens in ([1], [1, 30]):
        tokens = sum(lens)
        query, key, value = (torch.randn(tokens, 4, size).bfloat16() for size in (QK, QK, V))
        output = torch.empty_like(value)
        impl.forward_mha(query, key, value, builder.build_prefill(varlen(lens, lens, True)), Outputs(output))
    assert [(c["max_seqlen_q"], c["max_seqlen_k"], c["num_splits"]) for c in calls] == [(512, 1024, 1)] * 2


def test_prefill_and_decode_may_come_from_different_builds(emulate: Emulate) -> None:
    calls = emulate("vllm")
    selection = selection_of(FLASH_ATTN_MLA, mla_layer(num_heads=4), options={"provider": "vllm", "prefill_version": 2})
    group = layers.group_of(selection)
    (served,) = group.distinct
    impl = impl_of(served, scale=1.0)
    assert impl._adapters["decode"].build.label == "FA3 of vllm"
    assert impl._adapters["prefill"].build.label == "FA2 of vllm"
    assert impl._padding == QK - V
    assert not calls
