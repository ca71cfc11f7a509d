"""Ask the selector of the installed vLLM about layers on GPUs that are not here, and write its answers as JSON.

    python vllm_answers.py 8.0 9.0 10.0 12.0 > answers.json

Needs vLLM's Python files alone: its compiled parts are stood in for, so that they can be imported on a CPU. The
environment that ``make audit`` makes for a release that has no build for CPUs (``tests/engines/run.py``) will do:

    .venv-engines/vllm-0.33.0/bin/python vllm_answers.py 8.0 9.0 10.0 12.0 > vllm_answers_0_33_0.json

Every capability is asked in a process of its own, since vLLM remembers its device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from gpu_not_here import Gpu, gpu_that_is_not_here

LAYERS: dict[str, dict[str, Any]] = {
    "llama": {"head_size": 128},
    "llama-fp8": {"head_size": 128, "kv_cache_dtype": "fp8"},
    "llama-float32": {"head_size": 128, "dtype": "float32"},
    "llama-block-8": {"head_size": 128, "block_size": 8},
    "llama-head-80": {"head_size": 80},
    "gpt-oss-sliding": {"head_size": 64, "has_sink": True, "has_sliding_window": True},
    "gpt-oss-full": {"head_size": 64, "has_sink": True},
    "bert": {"head_size": 64, "attn_type": "encoder_only"},
    "deepseek": {"head_size": 576, "use_mla": True},
    "deepseek-fp8": {"head_size": 576, "use_mla": True, "kv_cache_dtype": "fp8"},
    "deepseek-block-128": {"head_size": 576, "use_mla": True, "block_size": 128},
    "deepseek-sparse": {"head_size": 576, "use_mla": True, "use_sparse": True},
}
"""Fields of ``AttentionSelectorConfig`` that differ from bfloat16, an ``auto`` cache and no block size."""
MLA_HEADS = 16


def answers(capability: tuple[int, int]) -> dict[str, Any]:
    """Return by layer what vLLM chooses on such a GPU, and per backend of that kind the reasons against it."""
    gpu = gpu_that_is_not_here(Gpu(capability))
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    sys.path.insert(0, __file__.rpartition("/")[0])
    from attn_select_vllm.names import TABLE

    found = {}
    with set_current_vllm_config(VllmConfig()):
        for layer, fields in LAYERS.items():
            wanted = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "block_size": None} | fields
            wanted["dtype"] = getattr(torch, wanted["dtype"])
            asked = AttentionSelectorConfig(**wanted)
            heads = MLA_HEADS if asked.use_mla else None
            refused = {}
            for name in dict.fromkeys(row.name for row in TABLE.names if row.argument == "attention"):
                if name not in AttentionBackendEnum.__members__:
                    continue
                try:
                    backend = AttentionBackendEnum[name].get_class()
                    if (backend.is_mla(), backend.is_sparse()) != (asked.use_mla, asked.use_sparse):
                        continue
                    capable = DeviceCapability(*capability)
                    refused[name] = backend.validate_configuration(device_capability=capable, **asked._asdict())
                except (ImportError, OSError) as error:
                    refused[name] = [f"{type(error).__name__}: {error}"]
            try:
                chosen = gpu.get_attn_backend_cls(None, asked, heads)
            except ValueError:
                chosen = None
            names = [n for n, m in AttentionBackendEnum.__members__.items() if m.value and m.get_path() == chosen]
            found[layer] = {"chosen": names[0] if names else chosen, "refused": refused}
    return found


def main() -> None:
    if sys.argv[1] == "--one":
        major, minor = sys.argv[2].split(".")
        found = answers((int(major), int(minor)))
        import vllm

        print(json.dumps({"version": vllm.__version__, "layers": found}))
        return
    result: dict[str, Any] = {"layers": LAYERS, "answers": {}}
    for capability in sys.argv[1:]:
        command = [sys.executable, __file__, "--one", capability]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        one = json.loads(done.stdout.splitlines()[-1])
        result["vllm"] = one["version"]
        result["answers"][capability] = one["layers"]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
