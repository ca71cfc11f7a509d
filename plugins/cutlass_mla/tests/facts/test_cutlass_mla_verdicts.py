"""What CUTLASS_MLA takes, from which build and with how many splits: the file of ``golden``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_select.testing.verdicts import Situation, check_verdicts
from attn_select_cutlass_mla.plugin import attn_select_register_backends

Fields = dict[str, Any]
FP8: Fields = {"kv_cache_dtype": "fp8"}
DCP: Fields = {"num_heads": 64, "decode_context_parallel_size": 2}
SGL = {"sgl-kernel": "0.3.21"}
FLASHINFER = {"flashinfer-python": "0.6.14"}


def installed(*layers: Fields, splits: int | None = None, provider: str | None = None, **versions: str) -> Situation:
    options = {"num_kv_splits": splits, "provider": provider}
    given = {name: value for name, value in options.items() if value is not None}
    return {
        "installed": {"torch": "2.11.0", **versions},
        **({"options": given} if given else {}),
        "layers": [{}, *layers],
    }


def forced(text: str, splits: int = 4) -> Situation:
    return {
        "options": {"num_kv_splits": splits},
        "variables": {"FORCE_NUM_KV_SPLITS": text},
        "layers": [{}, {"num_heads": 129}],
    }


SITUATIONS: list[Situation] = [
    {
        "layers": [
            *({**FP8, **more} for more in ({"dtype": "float16"}, {"per_head_quant_scales": True})),
            *(DCP, {**DCP, "num_heads": 65}, {"kv_lora_rank": 448, "qk_rope_head_dim": 128}),
        ]
    },
    installed(),
    installed(FP8, DCP, **SGL),
    installed(FP8, DCP, **FLASHINFER),
    installed(FP8, DCP, vllm="0.33.0", **SGL, **FLASHINFER),
    installed(**SGL, **FLASHINFER),
    installed(vllm="0.10.0"),
    installed(vllm="0.10.0", **SGL),
    installed(provider="sgl-kernel"),
    installed(provider="sgl-kernel", vllm="0.33.0"),
    installed(provider="vllm", vllm="0.10.0", **SGL),
    installed(splits=4, **FLASHINFER),
    installed(splits=-1, **FLASHINFER),
    installed(splits=4, **SGL, **FLASHINFER),
    {"options": {"provider": "sgl-kernel"}, "layers": [{}, FP8]},
    *({"options": {"num_kv_splits": splits}} for splits in (1, 4, 16)),
    *({"options": {"provider": "sgl-kernel", "num_kv_splits": splits}} for splits in (1, 8)),
    *(forced(text) for text in ("1", "2", "16", "-1", "", "0", "17", "-2", "two", "1.5")),
    {"options": {"workspace_bytes": 256 << 20}},
]


def test_verdicts() -> None:
    (spec,) = attn_select_register_backends()
    check_verdicts(spec, Path(__file__).parents[1] / "golden", SITUATIONS)
