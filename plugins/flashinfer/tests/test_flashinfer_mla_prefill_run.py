"""FLASHINFER_MLA's prefill: ragged keys and values, LSE in natural logarithms, requests without keys, chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attn_select.reference.running import impl_of
from attn_select.runtime import Outputs

pytest.importorskip("torch")

import flashinfer_emulated as fi
import flashinfer_mla_groups as layers
import torch

from attn_select.reference.oracle import attention_reference
from attn_select.runtime import VarlenMetadata

Emulate = Callable[..., Any]
WRAPPER, TRTLLM = "BatchPrefillWithRaggedKVCacheWrapper", "trtllm_ragged_attention_deepseek"
QK, V, HEADS = 192, 128, 4
KERNELS = {
    "fa3": ("h100", (9, 0), {}),
    "fa2": ("a100", (8, 0), {}),
    "trtllm-gen": ("b200", (10, 0), {}),
    "cutlass": ("b200", (10, 0), {"prefill_kernel": "cutlass"}),
}


def varlen(query_lens: list[int], key_lens: list[int], causal: bool) -> VarlenMetadata:
    starts = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, key_lens)]
    return VarlenMetadata(
        query_start_loc=starts[0].clone(),
        query_start_loc_cpu=starts[0],
        key_start_loc=starts[1].clone(),
        key_start_loc_cpu=starts[1],
        max_query_len=max(query_lens),
        max_key_len=max(key_lens),
        causal=causal,
        query_offsets_cpu=torch.zeros(len(query_lens), dtype=torch.int32),
        counts_sinks=causal,
    )


def prefiller(kernel: str, emulate: Emulate, *, entries: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return the emulated device, builder and impl of prefill alone."""
    gpu, capability, options = KERNELS[kernel]
    world = emulate(capability, **(entries or {}))
    group = layers.group_for(gpu, layers.mla_config(num_heads=HEADS, **fields), phases=["prefill"], **options)
    served, sinks = group.backends["prefill"], torch.randn(HEADS) if fields.get("sinks") else None
    return world, served.builder, impl_of(served, scale=QK**-0.5, sinks=sinks)


def check(builder: Any, impl: Any, batch: VarlenMetadata, *, contiguous: bool = True) -> None:
    """Run one call on views and padded, poisoned outputs, and compare with the oracle."""
    tokens, num_keys = int(batch.query_start_loc[-1]), int(batch.key_start_loc[-1])
    fi.on_device(batch.query_start_loc, batch.key_start_loc)
    query = torch.randn(tokens, HEADS, QK).bfloat16()
    key, value = (torch.randn(num_keys, HEADS, 256).bfloat16()[..., part] for part in (slice(QK), slice(V, None)))
    output, lse = torch.full((tokens + 2, HEADS, V), torch.nan).bfloat16(), torch.full((tokens + 2, HEADS), torch.nan)
    if not contiguous:
        output, lse = torch.cat([output, output], dim=2)[..., :V], torch.cat([lse, lse], dim=1)[:, :HEADS]
    impl.forward_mha(query, key, value, builder.build_prefill(batch), Outputs(output, lse))
    assert output[tokens:].isnan().all()
    assert lse[tokens:].isnan().all()
    for request in range(len(batch.query_start_loc) - 1):
        rows, keys = (slice(*each[request : request + 2]) for each in (batch.query_start_loc, batch.key_start_loc))
        options = {"sinks": impl.terms.sinks if batch.counts_sinks else None, "causal": batch.causal}
        wanted, its_lse = attention_reference(query[rows], key[keys], value[keys], scale=impl.terms.scale, **options)
        torch.testing.assert_close(output[rows].double(), wanted, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse[rows].double(), its_lse, atol=2e-3, rtol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_contexts_in_chunks(kernel: str, emulate: Emulate) -> None:
    gpu, capability, options = KERNELS[kernel]
    world = emulate(capability)
    group = layers.group_for(gpu, layers.mla_config(num_heads=16), **options)
    for requests in ([(1, 9), (20, 20), (9, 150), (2, 40)], [(4, 200), (5, 70)]):
        layers.run(group, layers.problem_for(group, requests))
    if kernel in ("fa2", "fa3"):
        # The step of most chunks says how many wrappers there are; the first keeps its own schedule.
        made, plans = world.named(f"{WRAPPER}.__init__"), world.named(f"{WRAPPER}.plan")
        assert [each["backend"] for each in made] == [kernel] * len(made)
        assert len(made) == 6
        assert [plan["causal"] for plan in plans] == [True] + [False] * 3 + [True] + [False] * 5
        assert all(plan[name].device.type == "cpu" for plan in plans for name in ("qo_indptr", "kv_indptr"))
    assert not world.syncs


def test_sinks_count_once(emulate: Emulate) -> None:
    world, builder, impl = prefiller("trtllm-gen", emulate, sinks=True)
    check(builder, impl, varlen([5, 3], [5, 3], True))
    check(builder, impl, varlen([5, 3], [7, 9], False))
    sinks = [call["attention_sinks"] for call in world.named(TRTLLM)]
    assert sinks[0].dtype == torch.float32
    assert sinks[1] is None


def test_trtllm_is_given_lengths_where_it_would_read_them_back(emulate: Emulate) -> None:
    seen: list[Any] = []
    ragged = fi.library().trtllm_ragged_attention_deepseek

    def since_0_6_18(*args: Any, q_seq_lens_cpu: Any = None, kv_seq_lens_cpu: Any = None, **kwargs: Any) -> Any:
        seen.append((q_seq_lens_cpu.tolist(), kv_seq_lens_cpu.tolist()))
        return ragged(*args, **kwargs)

    _, builder, impl = prefiller("trtllm-gen", emulate, entries={TRTLLM: since_0_6_18})
    check(builder, impl, varlen([5, 1, 9], [7, 0, 20], False))
    assert seen == [([5], [7]), ([9], [20])]
