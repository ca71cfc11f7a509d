"""One arm of ``compare.py``: an engine of vLLM in a process of its own, stepped by hand.

``python compare_engine.py JOB`` reads lines from its standard input, does what they say and answers each with a line of
JSON behind ``BENCH``: ``start``; ``fill REQUESTS TOKENS``, which puts a batch in place of the one that runs;
``steps COUNT``, which times decodes; ``share``, which profiles some; ``serve KIND SEED REQUESTS LONGEST``, which serves
drawn requests. JOB is what ``Engine`` takes, as JSON.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from serve_requests import drawn

COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {  # so many layers that a step takes the GPU longer than the host
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gpt-oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
    },
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 40,
        "first_k_dense_replace": 40,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
    },
}
MODELS["rank"] = MODELS["llama"] | {  # of Llama-3-70B under tensor parallelism 8
    "hidden_size": 2048,
    "intermediate_size": 3584,
    "num_hidden_layers": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
}
MODELS["narrow"] = MODELS["llama"] | {"num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 32}
MODELS["gemma2"] = {  # soft caps, windows in every other layer, heads of 256
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
MODELS["tiny"] = MODELS["llama"] | {  # for a CPU
    "vocab_size": 512,
    "torch_dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MODELS["mla-128"] = (
    MODELS["mla"]
    | {"num_hidden_layers": 28, "first_k_dense_replace": 28}
    | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 128)
)
CLASSES = {"LlamaForCausalLM": "llama", "DeepseekV2ForCausalLM": "deepseek_v2", "Gemma2ForCausalLM": "gemma2"}
WARM_STEPS = 2
"""Steps of a round that are not timed: the first waits for the host alone."""
ATTENTION = re.compile(r"attn|attention|flash::|mla|decode|combine|split_?kv|merge|xqa|paged", re.IGNORECASE)
"""Kernels whose names contain this are counted as attention's, but for those that write to the cache."""
WRITES = re.compile(r"reshape_and_cache|concat_and_cache|cache_update|cache_kernel", re.IGNORECASE)
BLOCK = 64
"""A multiple of every arm's block size: a prompt of one token more is a decode where all but that token is cached."""
FEW = 5
"""Requests of a batch that a graph of the whole batch's size pads."""
FIRST_LAYER = ".layers.0."
KEPT: dict[str, Any] = {}
"""Of one arm's process: the first layer's last ``output``, and the ``logits`` since they were taken."""


def random_weights(sinks: bool) -> None:
    """Draw dummy weights from N(0, 0.02), norms and sinks of 1; give every layer of a Llama sinks, if wanted."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.models import llama

    @torch.no_grad()
    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        for number, (_, tensor) in enumerate(model.named_parameters()):
            if tensor.ndim < 2:  # norms and sinks
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, 0.02, generator=torch.Generator(device=tensor.device).manual_seed(number))

    dummy_loader.DummyModelLoader.load_weights = load_weights
    if not sinks:
        return
    plain = llama.Attention

    class WithSinks(plain):  # type: ignore[misc, valid-type]
        def __init__(self, num_heads: int, *arguments: Any, **options: Any) -> None:
            logits = torch.nn.Parameter(torch.empty(num_heads), requires_grad=False)
            super().__init__(num_heads, *arguments, sinks=logits, **options)
            self.sinks = logits

    llama.Attention = WithSinks


def keep_first_layer() -> None:
    """Keep what the first layer's attention returns, in a place that graphs write to as well."""
    import torch
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    def keeping(forward: Any) -> Any:
        @functools.wraps(forward)
        def kept(self: Any, *arguments: Any, **options: Any) -> Any:
            output = forward(self, *arguments, **options)
            if FIRST_LAYER in self.layer_name:
                if "output" not in KEPT:  # the first run has the most tokens
                    KEPT["output"] = torch.zeros_like(output)
                KEPT["output"][: len(output)].copy_(output)
            return output

        return kept

    for layer in (Attention, MLAAttention):
        layer.forward = keeping(layer.forward)


def keep_logits(worker: Any) -> None:
    """Keep the logits that a worker's model computes from now on."""
    model = worker.model_runner.model
    compute = model.compute_logits

    def kept(*arguments: Any, **options: Any) -> Any:
        logits = compute(*arguments, **options)
        KEPT.setdefault("logits", []).append(logits.float().cpu())
        return logits

    model.compute_logits = kept


def forget_logits(worker: Any) -> None:
    """Undo ``keep_logits``."""
    del worker.model_runner.model.compute_logits


def taken(rows: int) -> dict[str, Any]:
    """Return the logits since the last call, and the first layer's last output of so many tokens."""
    import torch

    return {"logits": torch.cat(KEPT.pop("logits")), "first layer": KEPT["output"][:rows].float().cpu()}


def layers_of(worker: Any) -> dict[str, int]:
    """Count the layers of a worker by the backend that runs them."""
    counts: dict[str, int] = {}
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "attn_backend"):
            name = layer.attn_backend.get_name()
            counts[name] = counts.get(name, 0) + 1
    return counts


def is_attention(kernel: str) -> bool:
    """Say whether a kernel is attention's, by its name."""
    return bool(ATTENTION.search(kernel)) and not WRITES.search(kernel)


class Engine:
    """One arm's engine in this process, stepped by hand."""

    def __init__(self, job: dict[str, Any]) -> None:
        import importlib

        from vllm import LLM, ModelRegistry

        random_weights(job["model"] == "gpt-oss")
        if not job.get("serves"):
            keep_first_layer()
        config = {**COMMON, **MODELS[job["model"]]}
        (name,) = config["architectures"]
        module = importlib.import_module(f"vllm.model_executor.models.{CLASSES[name]}")
        ModelRegistry.register_model(name, getattr(module, name))  # else a second Python would look at it
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "config.json").write_text(json.dumps(config))
        requests = [batch for batch, _ in job["batches"]]
        longest = max(context for _, context in job["batches"])
        sizes = job.get("sizes") or sorted({1, *requests})
        self.llm = LLM(
            str(self.folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=config["torch_dtype"],
            kv_cache_dtype=job["kv_cache_dtype"],
            max_model_len=longest + 2 * BLOCK + job["most_steps"],
            max_num_seqs=max(requests),
            gpu_memory_utilization=0.1,  # arms start at once: what is free says nothing
            kv_cache_memory_bytes=job["cache_gib"] << 30,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
            enable_prefix_caching=True,
            seed=0,
            disable_log_stats=True,
            **({"attention_backend": job["backend"]} if job["backend"] else {}),
            **({"block_size": job["block_size"]} if job["block_size"] else {}),
            **({"speculative_config": n_grams(job["drafts"])} if job.get("drafts") else {}),
        )
        self.most_steps = job["most_steps"]
        self._scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self._filled = 0

    def decode(self, prompts: list[list[int]]) -> None:
        """Decode a token of each prompt."""
        self.llm.generate([{"prompt_token_ids": row} for row in prompts], self._wanted(1), use_tqdm=False)

    def fill(self, batch: int, context: int) -> None:
        """Put the requests of a batch in place of those that run, and step until all of them decode."""
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            engine.abort_request(list(self._scheduler.requests), internal=True)
            engine.step()
        self._filled += 1
        for number, row in enumerate(prompts_of(batch, context)):
            name = f"batch {self._filled}, request {number}"
            engine.add_request(name, {"prompt_token_ids": row}, self._wanted(self.most_steps))
        while len(self._scheduler.running) < batch or any(not self._decodes(one) for one in self._scheduler.running):
            engine.step()

    def steps(self, count: int) -> float:
        """Decode so many steps after ``WARM_STEPS``; return their seconds."""
        import torch

        torch.cuda.synchronize()
        before = self._computed()
        gc.collect()
        gc.disable()  # a collection takes longer than a step
        for _ in range(WARM_STEPS):
            self.llm.llm_engine.step()
        start = time.perf_counter()
        for _ in range(count):
            self.llm.llm_engine.step()  # returns with the tokens of a step, while the next one runs
        took = time.perf_counter() - start
        gc.enable()
        torch.cuda.synchronize()
        done, wanted = self._computed() - before, (count + WARM_STEPS) * len(self._scheduler.running)
        if done != wanted:
            raise SystemExit(f"{done} tokens were decoded in place of {wanted}")
        return took

    def serve(self, kind: str, seed: int, count: int, longest: int) -> dict[str, Any]:
        """Serve drawn requests, all given at once; return the seconds and the tokens of each."""
        requests, engine = drawn(kind, seed, count, longest or None), self.llm.llm_engine
        self._filled += 1
        tokens: dict[str, list[int]] = {}
        start = time.perf_counter()
        for number, (prompt, new) in enumerate(requests):
            name = f"{self._filled}, request {number}"
            tokens[name] = []
            engine.add_request(name, {"prompt_token_ids": prompt}, self._wanted(new))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = [*output.outputs[0].token_ids]
        return {"seconds": time.perf_counter() - start, "tokens": [*tokens.values()]}

    def share(self) -> dict[str, Any]:
        """Return attention's share of the kernels' time, their milliseconds per step and the longest of them."""
        import torch

        count = WARM_STEPS + 8
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.steps(count - WARM_STEPS)
        times = {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}
        whole = max(1e-9, sum(times.values()))
        top = sorted(times, key=lambda key: times[key], reverse=True)[:6]
        return {
            "share": sum(spent for key, spent in times.items() if is_attention(key)) / whole,
            "busy_ms": whole / count,
            "top": [[key[:60], times[key] / whole, is_attention(key)] for key in top],
        }

    def _wanted(self, tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        last = RequestOutputKind.FINAL_ONLY
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=last)

    def _decodes(self, request: Any) -> bool:
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)

    def _computed(self) -> int:
        return sum(request.num_computed_tokens for request in self._scheduler.running)


def n_grams(drafts: int) -> dict[str, Any]:
    """Return vLLM's settings of speculation by n-grams."""
    return {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@functools.cache
def prompts_of(batch: int, context: int) -> list[list[int]]:
    """Return the token ids of a batch: whole blocks, and one token that is never cached."""
    import torch

    generator = torch.Generator().manual_seed(batch)
    return torch.randint(3, 31999, (batch, context // BLOCK * BLOCK + 1), generator=generator).tolist()


def keep_outputs(engine: Engine, batch: int, context: int) -> Path:
    """Return the file of an arm's outputs, by case."""
    import torch

    prompts = prompts_of(batch, context)
    few = [row[: -4 * BLOCK - 2 : -1] for row in prompts[:FEW]]
    engine.llm.collective_rpc(keep_logits)
    kept = {}
    for prefill, decode, asked in (
        ("prefill", "decode", prompts),
        ("short prefill", "padded decode", few),
    ):
        engine.decode(asked)
        kept[prefill] = taken(0)
        engine.decode(asked)
        kept[decode] = taken(len(asked))
    engine.llm.collective_rpc(forget_logits)
    torch.save(kept, engine.folder / "kept.pt")
    return engine.folder / "kept.pt"


def worker(job: dict[str, Any]) -> None:
    """Run one arm: it does what the lines on its standard input say, and answers each with a line of JSON."""
    import torch  # noqa: F401  before the first line: until then all arms start at once
    import vllm  # noqa: F401

    engine: Engine | None = None
    for line in sys.stdin:
        began = time.perf_counter()
        word, *numbers = line.split()
        found: dict[str, Any] = {}
        if word == "start":
            engine = Engine(job)
            found["layers"] = engine.llm.collective_rpc(layers_of)[0]
            if not job.get("serves"):
                found["kept"] = str(keep_outputs(engine, *job["batches"][0]))
        elif engine is None:
            raise SystemExit(f"{word} before start")
        elif word == "fill":
            engine.fill(*map(int, numbers))
        elif word == "steps":
            found["seconds"] = engine.steps(int(numbers[0]))
        elif word == "serve":
            found |= engine.serve(numbers[0], *map(int, numbers[1:]))
        elif word == "share":
            found |= engine.share()
        print("BENCH " + json.dumps(found | {"took": time.perf_counter() - began}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # no wait for the threads that the engine leaves


if __name__ == "__main__":
    worker(json.loads(sys.argv[1]))
