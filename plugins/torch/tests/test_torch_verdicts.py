"""What the torch backends take, on which of torch's kernels: the files of ``golden``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.testing.verdicts import Situation, check_verdicts
from attn_select_torch.facts.flex_attention import TRITON
from attn_select_torch.plugin import attn_select_register_backends

Fields = dict[str, Any]
SINKS: Fields = {"sinks": True}
FP32: Fields = {"dtype": "float32"}
VERSIONS: list[Situation] = [{"pins": {"torch": version}} for version in ("2.8.0", "2.9.0")]
SDPA: list[Situation] = [
    {
        "layers": [
            {**FP32, "decode_context_parallel_size": 2},
            {**SINKS, "sliding_window": 128, "kv_cache_dtype": "fp8"},
            *({**FP32, "alibi": True, "attn_type": kind} for kind in ("decoder", "encoder_only", "encoder_decoder")),
            *({"attn_type": kind, "cuda_graph": "ALWAYS"} for kind in ("encoder", "encoder_only")),
            *({"head_size": 192, "v_head_size": v} for v in (128, 192)),
        ]
    },
    *VERSIONS,
]
FLEX: list[Situation] = [
    {
        "layers": [
            *({"dtype": dtype, "head_size": size} for dtype in ("float16", "float32") for size in (256, 257, 512, 513)),
            *({"dtype": dtype, "head_size": size} for dtype in ("float16", "float32") for size in (1024, 1025)),
            *({"head_size": head, "v_head_size": v} for head, v in ((20, 8), (192, 128))),
        ]
    },
    {"missing": [TRITON]},
    *VERSIONS,
]
SITUATIONS = {"TORCH_SDPA": SDPA, "FLEX_ATTENTION": FLEX}


@pytest.mark.parametrize("spec", attn_select_register_backends(), ids=lambda spec: spec.name)
def test_verdicts(spec: BackendSpec) -> None:
    check_verdicts(spec, Path(__file__).parent / "golden", SITUATIONS.get(spec.name, VERSIONS))
