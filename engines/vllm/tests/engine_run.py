"""Run vLLM's engine on model folders, one after another; print the tokens and what ran each layer, a line of JSON each.

python engine_run.py '[["FOLDER", {"enforce_eager": true}], …]'
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(length)] for i, length in enumerate((5, 40, 1, 23, 64))]


def layers(worker: Any) -> dict[str, str]:
    """What one worker runs: the backend by layer."""
    context = worker.vllm_config.compilation_config.static_forward_context
    return {name: layer.attn_backend.get_name() for name, layer in context.items() if hasattr(layer, "attn_backend")}


def run(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run an engine; ``shortest`` of the options leaves out prompts of up to so many tokens.

    The result has ``tokens`` by prompt, ``layers`` by worker, and ``drafts``: how many were made and how many accepted.
    """
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    shortest = options.pop("shortest", 0)
    fixed = {"skip_tokenizer_init": True, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    if "speculative_config" in options:
        fixed["disable_log_stats"] = False
    llm = LLM(folder, seed=0, **fixed, **options)
    prompts = [prompt for prompt in PROMPTS if len(prompt) > shortest]
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    metrics = llm.get_metrics() if "speculative_config" in options else []
    counted = {one.name: one.value for one in metrics if hasattr(one, "value")}
    result = {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "layers": llm.collective_rpc(layers),
        "drafts": [counted.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in ("draft", "accepted")],
    }
    llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()  # a process has one connector, which would go on with this engine's
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return result


if __name__ == "__main__":
    for folder, options in json.loads(sys.argv[1]):
        print("RESULT " + json.dumps(run(folder, options)), flush=True)
