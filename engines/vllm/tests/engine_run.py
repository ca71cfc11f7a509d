"""Run vLLM's engine on model folders, one after another; print the tokens and what ran each layer, a line of JSON each.

python engine_run.py '[["FOLDER", {"enforce_eager": true}], …]' [GPU]

With the name of a GPU, attn-select's kernels run by Triton's interpreter, as planned for it.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import interpreted
import numpy as np

PROMPTS = [[(7 * i + 3 * j) % 500 + 3 for j in range(length)] for i, length in enumerate((5, 40, 1, 23, 64))]


def layers(worker: Any) -> dict[str, str]:
    """What one worker runs: the backend by layer."""
    context = worker.vllm_config.compilation_config.static_forward_context
    return {name: layer.attn_backend.get_name() for name, layer in context.items() if hasattr(layer, "attn_backend")}


def run(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run an engine; of the options ``shortest`` leaves out prompts of up to so many tokens, ``sounds`` adds a sound.

    ``one_by_one`` gives it the next prompt when the last is answered, and ``tokens`` says how many an answer has.

    The result has ``layers`` by worker. It has ``tokens`` by prompt, and ``drafts``: how many were made, and how many
    accepted; of models that embed prompts it has the ``vectors``.
    """
    from vllm import LLM
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    shortest, one_by_one = options.pop("shortest", 0), options.pop("one_by_one", False)
    count = options.pop("tokens", 24)
    fixed = {"max_model_len": 256, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}
    embeds, sounds = options.get("runner") == "pooling", options.pop("sounds", False)
    # To embed and for sounds, vLLM wants a tokenizer even for tokens.
    fixed["skip_tokenizer_init"] = not embeds and not sounds
    if "speculative_config" in options:
        fixed["disable_log_stats"] = False
    llm = LLM(folder, seed=0, **(fixed | options))
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS if len(prompt) > shortest]
    if sounds:
        prompts = [{"encoder_prompt": _sound(i), "decoder_prompt": prompt} for i, prompt in enumerate(prompts)]
    steps = [[prompt] for prompt in prompts] if one_by_one else [prompts]
    result = _vectors(llm, prompts) if embeds else _tokens(llm, steps, count)
    result["layers"] = llm.collective_rpc(layers)
    llm.llm_engine.engine_core.shutdown()
    ensure_kv_transfer_shutdown()  # a process has one connector, which would go on with this engine's
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()
    return result


def _sound(seed: int) -> dict[str, Any]:
    noise = np.random.default_rng(seed).standard_normal(16000 * (1 + seed)).astype(np.float32)
    return {"prompt": "", "multi_modal_data": {"audio": (noise * 0.1, 16000)}}


def _vectors(llm: Any, prompts: list[Any]) -> dict[str, Any]:
    return {"vectors": [list(one.outputs.embedding) for one in llm.embed(prompts, use_tqdm=False)]}


def _tokens(llm: Any, steps: list[list[Any]], count: int) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = [one for prompts in steps for one in llm.generate(prompts, sampling, use_tqdm=False)]
    metrics = llm.get_metrics() if llm.llm_engine.vllm_config.speculative_config is not None else []
    counted = {one.name: one.value for one in metrics if hasattr(one, "value")}
    drafts = [counted.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in ("draft", "accepted")]
    return {"tokens": [list(one.outputs[0].token_ids) for one in outputs], "drafts": drafts}


if __name__ in ("__main__", "__mp_main__"):  # in each worker too, where it is spawned
    for gpu in sys.argv[2:]:
        interpreted.start(gpu)
if __name__ == "__main__":
    for folder, options in json.loads(sys.argv[1]):
        found = run(folder, options) | {"bounded_steps": interpreted.bounded_steps()}
        print("RESULT " + json.dumps(found), flush=True)
