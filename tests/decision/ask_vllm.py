"""Ask vLLM's own selector every question of ``vllm_questions`` and write its answers.

    PYTHONPATH=/path/to/vllm-0.33.0:/path/to/both python tests/decision/ask_vllm.py tests/decision/vllm_0_33_0.json.xz

``engines/vllm/tests/vllm_answers.py`` says how vLLM's Python files are laid out for that: no compiled part is needed.
The file holds, by compute capability and for each question in order, the backends that vLLM accepts, its choice first,
its reasons against the others, and its choice for MLA prefill.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("engines/vllm/tests", "engines/vllm", "core", "tests/decision")]

from vllm_answers import gpu_that_is_not_here  # noqa: E402
from vllm_questions import CAPABILITIES, Question, questions  # noqa: E402

VISIBLE_HEADS = 16
"""What vLLM is asked with where a layer is not MLA: its selector does not look at it."""


def answers(capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Return vLLM's answer to every question on one GPU."""
    gpu = gpu_that_is_not_here(capability)
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

    with set_current_vllm_config(VllmConfig()):
        return [_answer(gpu, capability, question, MLAPrefillBackendEnum) for question in questions()]


def _answer(gpu: Any, capability: tuple[int, int], question: Question, prefills: Any) -> dict[str, Any]:
    import torch
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

    fields = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "block_size": None} | question
    heads, dims = fields.pop("num_heads", VISIBLE_HEADS), fields.pop("dims", None)
    fields["dtype"] = getattr(torch, fields["dtype"])
    asked, capable = AttentionSelectorConfig(**fields), DeviceCapability(*capability)
    valid, refused = gpu.get_valid_backends(capable, asked, heads)
    found: dict[str, Any] = {
        "accepted": [each.backend.name for each in sorted(valid, key=lambda each: each.priority)],
        "refused": {backend.name: reasons for backend, (_, reasons) in refused.items()},
    }
    if dims is not None:
        nope, rope, value = dims
        sizes = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value)
        wanted = MLAPrefillSelectorConfig(fields["dtype"], sizes)
        try:
            prefill = gpu.get_mla_prefill_backend_cls(wanted)
            found["prefill"] = next(name for name, each in prefills.__members__.items() if each.get_class() is prefill)
        except ValueError:
            found["prefill"] = None
    return found


def main() -> None:
    if sys.argv[1] == "--one":
        major, minor = sys.argv[2].split(".")
        found = answers((int(major), int(minor)))
        import vllm

        print(json.dumps({"version": vllm.__version__, "answers": found}))
        return
    result: dict[str, Any] = {"questions": questions(), "answers": {}}
    for capability in CAPABILITIES:
        command = [sys.executable, __file__, "--one", capability]
        one = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        result["vllm"] = one["version"]
        result["answers"][capability] = one["answers"]
        print(capability, len(one["answers"]), flush=True)
    Path(sys.argv[1]).write_bytes(lzma.compress(json.dumps(result).encode(), preset=9))


if __name__ == "__main__":
    main()
