"""What the three backends take, on which FlashAttention and from which build: the files of ``golden``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.testing.verdicts import Situation, check_verdicts
from attn_select_flash_attn.plugin import attn_select_register_backends

WIDE: dict[str, Any] = {"head_size": 192, "v_head_size": 128}
ENCODER: dict[str, Any] = {"attn_type": "encoder_only"}
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
SINKS: dict[str, Any] = {"sinks": True}
ALIBI: dict[str, Any] = {"alibi": True}
TREE: dict[str, Any] = {"draft_tree": True, "num_speculative_tokens": 3}


def installed(*layers: dict[str, Any], **versions: str) -> Situation:
    return {"installed": {"torch": "2.11.0", **versions}, "layers": [{}, *layers]}


DENSE: list[Situation] = [
    {
        "layers": [
            *({"head_size": head, "v_head_size": v} for head, v in ((192, 128), (192, 96), (64, 32), (64, 36))),
            *({"head_size": head, "v_head_size": v, **ENCODER} for head, v in ((64, 256), (64, 520))),
            *({"head_size": head, "v_head_size": v, **FP8} for head, v in ((192, 128), (192, 104), (64, 48))),
            *({**FP8, **more} for more in ({"dtype": "float16"}, ALIBI, {"head_size": 72}, {"head_size": 80})),
            *({"batch_invariant": True, **more} for more in (FP8, SINKS)),
            {**FP8, "per_head_quant_scales": True},
            *({**SINKS, **more} for more in (WIDE, {"num_heads": 64}, {"num_heads": 72}, {"num_heads": 128})),
            *({"decode_context_parallel_size": 4, **more} for more in (ALIBI, {"sliding_window": 128})),
            *({"head_size": size, "sliding_window": 2048} for size in (128, 192)),
            {"attn_type": "encoder_decoder", "sliding_window": 64},
            *({**TREE, **more} for more in (FP8, SINKS, {"sliding_window": 8}, {"batch_invariant": True})),
        ]
    },
    *(
        {
            "options": {"version": version},
            "layers": [{}, ALIBI, FP8, {"attn_type": "encoder_decoder", "sliding_window": 64}],
        }
        for version in (2, 3, 4)
    ),
    {
        "options": {"provider": "flash-attn-4"},
        "layers": [
            *({"head_size": size, **more} for size in (72, 96, 112, 160, 192, 224, 256) for more in ({}, ENCODER)),
            *({"head_size": 64, "v_head_size": v, **more} for v in (128, 192) for more in ({}, ENCODER)),
            *(FP8, ALIBI, WIDE, {"batch_invariant": True}, {"head_size": 128, "v_head_size": 256, **ENCODER}),
        ],
    },
    {"options": {"provider": "flash-attn"}, "layers": [{}, {"block_size": 512}]},
    installed(ALIBI, FP8),
    installed(SINKS, ALIBI, **{"flash-attn-3": "3.0.0"}),
    installed({"block_size": 16}, {"block_size": 512}, **{"flash-attn": "2.8.3"}),
    installed({**SINKS, "num_heads": 128}, {**SINKS, **WIDE}, {"head_size": 512}, vllm="0.26.0"),
    installed({"head_size": 512}, vllm="0.32.0"),
    installed({"head_size": 512}, {"head_size": 256}, {**SINKS, **WIDE}, {"block_size": 1}, vllm="0.33.0"),
    {**installed(vllm="0.33.0"), "options": {"provider": "flash-attn"}},
    installed({"block_size": 24}, **{"flash-attn": "2.8.3", "vllm": "0.26.0"}),
    installed(**{"flash-attn-3": "3.0.0", "vllm": "0.33.0"}),
    installed(**{"flash-attn-4": "4.0.0b36"}),
    installed(**{"flash-attn-4": "4.0.0b36", "vllm": "0.26.0"}),
    installed(**{"flash-attn-4": "4.0.0b36", "vllm": "0.33.0"}),
    installed(**{"sglang-kernel": "0.4.10"}),
    installed(**{"sgl-kernel": "0.3.21"}),
    installed(vllm="0.8.0"),
    {"pins": {"vllm": "0.8.0"}},
    {"pins": {"vllm": "0.8.0"}, "options": {"provider": "vllm"}},
]
DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MLA: list[Situation] = [
    {
        "layers": [
            *(
                dict(zip(DIMS, dims, strict=True))
                for dims in (
                    (64, 32, 64),
                    (192, 64, 256),
                    (64, 64, 128),
                    (192, 72, 128),
                    (100, 64, 128),
                    (128, 64, 200),
                )
            ),
            *({"num_heads": 16, "num_speculative_tokens": drafts} for drafts in (3, 4)),
            {"num_heads": 16, "decode_context_parallel_size": 8},
            {"num_heads": 4, "batch_invariant": True},
            *({"kv_lora_rank": rank, "qk_rope_head_dim": rope} for rank, rope in ((500, 20), (520, 32), (256, 32))),
            {**FP8, "block_size": 3},
        ]
    },
    *({"options": {"prefill_version": version}, "layers": [{}, {"batch_invariant": True}]} for version in (2, 3, 4)),
    installed(**{"flash-attn": "2.8.3"}),
]
SPARSE: list[Situation] = [
    {"options": {"provider": "vllm"}},
    installed(vllm="0.32.0"),
    installed(**{"flash-attn": "2.8.3"}),
]
SITUATIONS = {"FLASH_ATTN": DENSE, "FLASH_ATTN_MLA": MLA, "FLASH_ATTN_MLA_SPARSE": SPARSE}


@pytest.mark.parametrize("spec", attn_select_register_backends(), ids=lambda spec: spec.name)
def test_verdicts(spec: BackendSpec) -> None:
    usual = {"num_heads": 8} if spec.name == "FLASH_ATTN_MLA_SPARSE" else None
    check_verdicts(spec, Path(__file__).parents[1] / "golden", SITUATIONS[spec.name], usual=usual)
