"""What both backends take, in which of FlashMLA's functions and from which build: the files of ``golden``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.testing.verdicts import Situation, check_verdicts
from attn_select_flashmla.plugin import attn_select_register_backends

Fields = dict[str, Any]
FP8: Fields = {"kv_cache_dtype": "fp8"}
FP8_DS: Fields = {"kv_cache_dtype": "fp8_ds_mla"}
BUILDS = {"vllm": "0.33.0", "sgl-flash-mla": "1.0.0", "sgl-kernel": "0.3.21", "sglang-kernel": "0.4.10"}


def installed(*layers: Fields, **versions: str | None) -> Situation:
    return {"installed": {"torch": "2.11.0", **versions}, "layers": [{}, *layers]}


DENSE: list[Situation] = [
    {
        "layers": [
            {**FP8, "per_head_quant_scales": True},
            {**FP8, "dtype": "float16"},
            {"kv_lora_rank": 448, "qk_rope_head_dim": 128},
        ]
    },
    installed({"kv_lora_rank": 448, "qk_rope_head_dim": 128}),
    *(installed(FP8, **{name: version}) for name, version in BUILDS.items()),
    installed(FP8, **{"flash-mla": "1.0.0+9241ae3"}),
    installed(**{"sgl-flash-mla": "1.0.0", "flash-mla": None}),
    {**installed(**{"sgl-flash-mla": "1.0.0", "flash-mla": None}), "options": {"provider": "flash-mla"}},
    {"pins": {"vllm": "0.8.0"}},
    {"pins": {"vllm": "0.8.0"}, "options": {"provider": "vllm"}},
    {"options": {"provider": "sgl-kernel"}},
]
SPARSE: list[Situation] = [
    {
        "layers": [
            *({**fp8, "num_heads": heads} for fp8 in (FP8, FP8_DS) for heads in (16, 31, 32, 64)),
            *({**FP8_DS, "block_size": size} for size in (1, 16, 64, 128)),
            *({**FP8_DS, "sparse_top_k": top_k} for top_k in (100, 192)),
            *({"num_heads": heads, "decode_context_parallel_size": ranks} for heads, ranks in ((16, 8), (64, 4))),
            {**FP8_DS, "qk_rope_head_dim": 0},
            {"kv_lora_rank": 448, "qk_rope_head_dim": 128},
        ]
    },
    installed(),
    *(installed(FP8_DS, {"sinks": True}, **{name: version}) for name, version in BUILDS.items()),
    {**installed(vllm="0.33.0"), "options": {"provider": "flash-mla"}},
]
SITUATIONS = {"FLASHMLA": DENSE, "FLASHMLA_SPARSE": SPARSE}


@pytest.mark.parametrize("spec", attn_select_register_backends(), ids=lambda spec: spec.name)
def test_verdicts(spec: BackendSpec) -> None:
    check_verdicts(spec, Path(__file__).parents[1] / "golden", SITUATIONS[spec.name])
