"""What the seven backends take, on which of FlashInfer's kernels and from which release: the files of ``golden``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.testing.verdicts import Situation, check_verdicts
from attn_select_flashinfer.plugin import attn_select_register_backends

Fields = dict[str, Any]
FP8: Fields = {"kv_cache_dtype": "fp8"}
FP8_DS: Fields = {"kv_cache_dtype": "fp8_ds_mla"}
E5M2: Fields = {"kv_cache_dtype": "fp8_e5m2"}
HALF: Fields = {"dtype": "float16"}
CAP: Fields = {"logits_soft_cap": 5.0}
SINKS: Fields = {"sinks": True}
WINDOW: Fields = {"sliding_window": 128}
DCP: Fields = {"decode_context_parallel_size": 2}
INVARIANT: Fields = {"batch_invariant": True}
TREE: Fields = {"draft_tree": True, "num_speculative_tokens": 3}
SCALES: Fields = {**FP8, "per_head_quant_scales": True}


def release(version: str, *layers: Fields, **options: Any) -> Situation:
    given = {"options": options} if options else {}
    return {"pins": {"flashinfer-python": version}, **given, "layers": [{}, *layers]}


def drafts(number: int) -> Fields:
    return {"num_speculative_tokens": number}


FLASHINFER: list[Situation] = [
    {
        "layers": [
            *({**FP8, **more} for more in (HALF, CAP, WINDOW, SINKS, DCP, drafts(3), {"head_size": 256})),
            *({**SCALES, **more} for more in ({}, E5M2, CAP, SINKS, {"head_size": 512})),
            *({**SINKS, **more} for more in (CAP, DCP, {"head_size": 64}, {"head_size": 64, **WINDOW})),
            *({"head_size": 256, **more} for more in (CAP, *({"block_size": size} for size in (16, 24, 48)))),
            {"head_size": 256, "block_size": 16, **CAP},
            *({"num_heads": heads, "num_kv_heads": kv} for heads, kv in ((64, 2), (48, 1), (71, 1))),
            *({"output_quantization": kind, **more} for kind in ("fp8", "fp4") for more in ({}, FP8, HALF)),
            *({**HALF, **more} for more in ({"head_size": 512}, FP8, E5M2)),
            *({**INVARIANT, **more} for more in ({"head_size": 512}, FP8)),
            *({**TREE, **more} for more in ({}, FP8, SINKS)),
            *({"cuda_graph": level, **more} for level in ("UNIFORM_BATCH", "ALWAYS") for more in (CAP, DCP)),
            {**WINDOW, **drafts(2)},
            {"non_causal": True, **FP8, **drafts(2)},
        ]
    },
    release("0.6.13"),
    release("0.6.14", HALF, {**FP8, **WINDOW}, {"head_size": 192}, {"head_size": 80}),
    release("0.6.15", HALF, {**FP8, **WINDOW}, {**WINDOW, **drafts(2)}, {"non_causal": True, **FP8, **drafts(2)}),
    release("0.6.16", HALF, {**WINDOW, **drafts(2)}, {"non_causal": True, **FP8, **drafts(2)}),
    release("0.6.17", drafts(3), drafts(4)),
    release("0.6.18", drafts(4), {"head_size": 192}),
    release("0.7.2.post1", {"head_size": 192}, TREE),
    release("0.7.1", decode_kernel="cute-dsl"),
    release(
        "0.7.2.post1",
        *({"block_size": 12}, drafts(1), FP8, CAP, INVARIANT, TREE, {**SINKS, "sliding_window": 100}),
        decode_kernel="cute-dsl",
    ),
    release("0.7.2.post1", decode_kernel="cute-dsl", use_trtllm=True),
    {"options": {"use_trtllm": False}, "layers": [{}, FP8, SINKS]},
    {
        "options": {"use_trtllm": True},
        "layers": [
            *({}, {**CAP, "block_size": 8}, DCP, {"num_heads": 48, "num_kv_heads": 1}, E5M2, INVARIANT, SCALES),
            *({"non_causal": True}, {"head_size": 512}, {"output_quantization": "fp8"}),
        ],
    },
    {"options": {"prefill_kernel": "fa2"}, "layers": [{}, FP8, INVARIANT, SCALES]},
    {"options": {"prefill_kernel": "fa3"}, "layers": [{}, E5M2, CAP, {**FP8, **CAP}]},
    {"options": {"native_workspace_bytes": 64 << 20, "trtllm_workspace_bytes": 32 << 20}},
]
RANK: Fields = {"kv_lora_rank": 256}
WIDE: Fields = {"qk_nope_head_dim": 192, "v_head_dim": 256}
MLA: list[Situation] = [
    {
        "layers": [
            *(
                {**FP8, **more}
                for more in (HALF, RANK, DCP, drafts(1), {"block_size": 16}, {"num_heads": 16}, {"num_heads": 160})
            ),
            *(SCALES, {"kv_lora_rank": 448, "qk_rope_head_dim": 128}, WIDE, {**WIDE, **HALF}, {"v_head_dim": 96}),
            *({"kv_lora_rank": rank} for rank in (384, 1024)),
            {"num_heads": 16, "block_size": 16},
        ]
    },
    *(release(version) for version in ("0.6.13", "0.6.14", "0.6.18.post1", "0.7.0", "0.7.0.post1", "0.7.1", "0.7.2")),
    *({"options": {"decode_kernel": kernel}, "layers": [{}, RANK]} for kernel in ("fa2", "fa3", "trtllm-gen", "xqa")),
    *(
        {"options": {"prefill_kernel": kernel}, "layers": [{}, WIDE]}
        for kernel in ("fa2", "fa3", "trtllm-gen", "cutlass")
    ),
    {"options": {"workspace_bytes": 64 << 20}, "layers": [{}, DCP]},
]
CUTE_DSL: list[Situation] = [
    {"layers": [{**SINKS, **FP8}, {**SINKS, **DCP}]},
    *({"options": {"implementation": kind}, "layers": [{}, DCP, SINKS]} for kind in ("modular", "monolithic")),
    *(release(version) for version in ("0.6.14", "0.7.0", "0.7.2.post1")),
]
SPARSE: list[Situation] = [
    {
        "layers": [
            *({**FP8, **more} for more in (HALF, SINKS, {"num_heads": 20}, {"qk_rope_head_dim": 0})),
            *(
                {**FP8_DS, **more}
                for more in (HALF, SINKS, DCP, drafts(3), INVARIANT, {"num_heads": 5}, {"num_heads": 129})
            ),
            *({**FP8_DS, "block_size": size} for size in (32, 64, 128)),
            {"kv_lora_rank": 448, "qk_rope_head_dim": 128},
        ]
    },
    *(
        release(version, {"qk_rope_head_dim": 0}, *({**FP8_DS, "sparse_top_k": top_k} for top_k in (100, 512, 2048)))
        for version in ("0.6.14", "0.6.18", "0.7.0", "0.7.1")
    ),
    {"options": {"workspace_bytes": 64 << 20}},
]
STATES: list[Situation] = [release(version) for version in ("0.6.14", "0.6.17.post1", "0.6.18", "0.7.2.post1")]
SITUATIONS = {
    "FLASHINFER": FLASHINFER,
    "FLASHINFER_MLA": MLA,
    "FLASHINFER_MLA_CUTE_DSL": CUTE_DSL,
    "FLASHINFER_MLA_SPARSE": SPARSE,
}
USUAL: dict[str, Fields] = {
    "FLASHINFER_KDA": {"recurrence": "kda", "state_dtype": "bfloat16"},
    "FLASHINFER_MAMBA": {"recurrence": "mamba2", "num_heads": 2, "num_v_heads": 8, "v_head_size": 64},
}


@pytest.mark.parametrize("spec", attn_select_register_backends(), ids=lambda spec: spec.name)
def test_verdicts(spec: BackendSpec) -> None:
    situations = SITUATIONS.get(spec.name, STATES)
    check_verdicts(spec, Path(__file__).parent / "golden", situations, usual=USUAL.get(spec.name))
