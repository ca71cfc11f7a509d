"""Run SGLang's engine on a CPU for several model folders, one after another; print the tokens, a line of JSON each.

python sglang_engine_run.py '[["FOLDER", {"attention_backend": "torch_native"}], …]'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang_on_cpu

# At the top: each of the engine's processes imports this file.
sglang_on_cpu.define_operations()
sglang_on_cpu.emulate_vllm()
sglang_on_cpu.emulate_sgl_kernel()
sglang_on_cpu.absorb_everything()
sglang_on_cpu.plan_for_a_gpu()


def run(folder: str, options: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of two rounds; the second one's prompts begin with what the first left in the cache.

    The option ``max_new_tokens`` says how many tokens an answer has, if not 24.
    """
    import sglang

    max_new_tokens = options.pop("max_new_tokens", 24)
    fixed = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "random_seed": 0, "log_level": "info"}
    sizes = {"max_total_tokens": 2048, "max_running_requests": 16, "disable_cuda_graph": True}
    engine = sglang.Engine(model_path=folder, **fixed | sizes | options)
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    tokens, prompts, steps = [], sglang_on_cpu.PROMPTS, 0
    for _ in range(2):
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        found = [one["output_ids"] for one in answers]
        steps += sum(one["meta_info"].get("spec_verify_ct", 0) for one in answers)
        prompts = [prompt + row[:7] for prompt, row in zip(prompts, found, strict=True)]
        tokens += found
    engine.shutdown()
    if steps:
        print(f"DRAFTS were checked in {steps} steps for {sum(map(len, tokens))} tokens", flush=True)
    return tokens


if __name__ == "__main__":
    for folder, options in json.loads(sys.argv[1]):
        print("RESULT " + json.dumps(run(folder, options)), flush=True)
