"""One run of vLLM's engine on a model folder: prints the tokens and what ran each layer as one line of JSON.

python engine_run.py FOLDER '{"enforce_eager": true}'
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(length)] for i, length in enumerate((5, 40, 1, 23, 64))]


def layers(worker: Any) -> dict[str, str]:
    """What one worker runs: the backend by layer, and whether it was given work."""
    context = worker.vllm_config.compilation_config.static_forward_context
    return {name: layer.attn_backend.get_name() for name, layer in context.items() if hasattr(layer, "attn_backend")}


def main() -> None:
    from vllm import LLM, SamplingParams

    options = {
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 64 << 20,
        "seed": 0,
        "dtype": "float32",
    }
    llm = LLM(sys.argv[1], **options, **json.loads(sys.argv[2]))
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print("RESULT " + json.dumps({"tokens": tokens, "layers": llm.collective_rpc(layers)}), flush=True)


if __name__ == "__main__":
    main()
