"""What the Triton backends take, on which kernels: the files of ``golden``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.testing.verdicts import Situation, check_verdicts
from attn_select_triton.plugin import attn_select_register_backends

Fields = dict[str, Any]
FP8: Fields = {"kv_cache_dtype": "fp8"}
ALIBI: Fields = {"alibi": True}
HALF: Fields = {"dtype": "float16"}
SINKS: Fields = {"sinks": True}
WINDOW: Fields = {"sliding_window": 100}
RELEASES: list[Situation] = [
    {"pins": {"triton": release}, "layers": [{}, {"block_size": 16}]}
    for release in ("3.5.1", "3.6.0", "3.6.1", "3.7.0", "3.9.0", "3.11.0+git1234")
]
ATTENTION: list[Situation] = [
    {
        "layers": [
            *(
                {**FP8, **more}
                for more in ({"head_size": 96}, {"block_size": 64}, {"alibi": True}, {"dtype": "float16"})
            ),
            *({**FP8, "per_head_quant_scales": True, "output_quantization": kind} for kind in ("none", "fp8")),
            *(
                {"block_size": 64, **more}
                for more in ({"dtype": "float16"}, {"alibi": True}, {"batch_invariant": True})
            ),
            *({"block_size": 192, **WINDOW, **more} for more in ({}, {"non_causal": True})),
            *({"head_size": 64, **more} for more in (SINKS, WINDOW, {"v_head_size": 520})),
            *({"head_size": head, "v_head_size": v} for head, v in ((192, 128), (96, 64), (112, 64))),
            *({"num_heads": heads, "num_kv_heads": 1} for heads in (32, 71)),
            {"head_size": 256, "logits_soft_cap": 30.0},
            {"block_size": 2**31 - 16},
        ]
    },
    *({"options": {"gather_workspace_mib": mib}, "layers": [{}, {"alibi": True}, FP8]} for mib in (0, 7)),
    *RELEASES,
]
MLA: list[Situation] = [
    {
        "layers": [
            {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
            *(
                {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v}
                for nope, rope, v in ((64, 32, 64), (192, 64, 256), (128, 64, 112))
            ),
            {**FP8, "block_size": 1},
            *({**FP8, **more} for more in ({"batch_invariant": True}, {"num_heads": 16}, {"block_size": 16})),
        ]
    },
    *RELEASES,
]
PAGED: list[Situation] = [
    {
        "layers": [
            *({"head_size": size, **FP8} for size in (112, 120)),
            *({"block_size": size} for size in (4, 12)),
            {"num_kv_heads": 1},
        ]
    },
    *(
        {"options": {"gather_workspace_mib": mib}, "layers": [{}, {"dtype": "float32"}, {"head_size": 96}]}
        for mib in (0, 3)
    ),
    *RELEASES,
]
SITUATIONS = {"TRITON_ATTN": ATTENTION, "TRITON_MLA": MLA, "PAGED_ATTENTION": PAGED}


@pytest.mark.parametrize("spec", attn_select_register_backends(), ids=lambda spec: spec.name)
def test_verdicts(spec: BackendSpec) -> None:
    situations = SITUATIONS.get(spec.name, [] if spec.name == "TRITON_STATE" else RELEASES)
    usual = {"num_heads": 16} if spec.name == "TRITON_MLA_SPARSE" else None
    # Partial results take memory by SMs, heads and widths: test_triton_facts.py.
    check_verdicts(spec, Path(__file__).parent / "golden", situations, usual=usual, left_out=["workspace_bytes"])
