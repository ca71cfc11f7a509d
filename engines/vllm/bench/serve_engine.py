"""One arm of ``serve.py`` or ``settings.py``: an engine of vLLM in a process of its own, stepped by hand.

``python serve_engine.py ADDRESS JOB`` connects to the address. JOB is what ``Engine`` takes, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serve_profile import device_times
from serve_requests import drawn, shared_prefix

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
    "tie_word_embeddings": True,  # vLLM's model takes no other
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
CLASSES = {
    "LlamaForCausalLM": "llama",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "Gemma2ForCausalLM": "gemma2",
    "EagleLlamaForCausalLM": "llama_eagle",
}
SPREAD = 0.02
"""Standard deviation of the weights."""
RANK = 16
"""Of the LoRA adapter."""
ROOM = 128
"""Tokens of the longest request beyond the drawn ones and the shared ones: drafts need some."""


def random_weights(sinks: bool) -> None:
    """Draw dummy weights from N(0, SPREAD), norms and sinks of 1; give every layer of a Llama sinks, if wanted.

    An EAGLE head gets the weights of its target's first layer and sees embeddings alone, so it is right where the
    target has no other layer. It has no norm before its attention, whose weights take over what that does.
    """
    import torch
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.models import llama

    @torch.no_grad()
    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        for number, (name, tensor) in enumerate(model.named_parameters()):
            if name.endswith(("k_scale", "v_scale")):  # of an FP8 cache
                tensor.copy_(torch.linspace(0.5, 1.5, tensor.numel()).reshape(tensor.shape))
            elif tensor.ndim < 2:  # norms and sinks
                tensor.fill_(1.0)
            elif name.endswith("model.fc.weight"):
                tensor.copy_(torch.eye(*tensor.shape, device=tensor.device))
            else:
                tensor.normal_(0.0, SPREAD, generator=torch.Generator(device=tensor.device).manual_seed(number))
            if "qkv_proj" in name and type(model).__name__.startswith("Eagle"):
                tensor.div_(SPREAD)

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


def layers_of(worker: Any) -> dict[str, int]:
    """Count the layers of a worker by the backend that runs them."""
    counts: dict[str, int] = {}
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "attn_backend"):
            name = layer.attn_backend.get_name()
            counts[name] = counts.get(name, 0) + 1
    return counts


class Engine:
    """One arm's engine in this process, stepped by hand.

    A job names a ``model`` of ``MODELS`` and the ``backend`` (None: vLLM and its plugins choose), the tokens of the
    ``longest`` request, the ``sizes`` of captured decodes, and ``cache_gib``. It may change the model's ``config`` and
    the ``options`` of vLLM's ``LLM``. ``speculate`` is as ``serve.py`` has it; ``shared`` is the tokens with which
    every prompt begins; ``lora`` gives every other request an adapter; ``sleep`` lets the engine sleep and wake before
    each service but the first.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        random_weights(job["model"] == "gpt-oss")
        config = {**COMMON, **MODELS[job["model"]], **job.get("config", {})}
        register(config["architectures"][0])
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "config.json").write_text(json.dumps(config))
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": job["sizes"]}
        options = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": config["torch_dtype"],
            "max_model_len": job["longest"] + job.get("shared", 0) + ROOM,
            "max_num_seqs": max(job["sizes"]),
            "gpu_memory_utilization": 0.1,  # arms start at once: what is free says nothing
            "kv_cache_memory_bytes": job["cache_gib"] << 30,
            "compilation_config": graphs,
            "enable_prefix_caching": True,
            "seed": 0,
            "disable_log_stats": True,
        }
        if job["backend"]:
            options["attention_backend"] = job["backend"]
        if job.get("speculate"):
            options["speculative_config"] = speculation(job["speculate"], config, self.folder, job["backend"])
        self.llm = LLM(str(self.folder), **options | job.get("options", {}))
        self._job, self._served = job, 0
        self._adapter = adapter(config, self.folder) if job.get("lora") else None

    def profiled(self, *arguments: Any) -> dict[str, Any]:
        """Serve as ``serve`` does while PyTorch's profiler watches the device; return what it saw."""
        from torch.profiler import ProfilerActivity, profile

        self.llm.reset_prefix_cache()  # they may have been served before
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.serve(*arguments)
        return device_times(seen)

    def serve(
        self, kind: str, seed: int, count: int, longest: int | None, most_new: int | None = None
    ) -> dict[str, Any]:
        """Serve drawn requests, all given at once; return the seconds and the tokens of each.

        The result also has how many prompt tokens were ``cached``, and the ``drafts`` made and accepted until now
        where vLLM counts them. ``most_new`` bounds the tokens that a request gets.
        """
        requests, engine = drawn(kind, seed, count, longest), self.llm.llm_engine
        prefix = shared_prefix(self._job.get("shared", 0))
        if self._job.get("sleep") and self._served:
            self.llm.sleep(level=1)
            self.llm.wake_up()
        self._served += 1
        tokens: dict[str, list[int]] = {}
        cached = 0
        start = time.perf_counter()
        for number, (prompt, new) in enumerate(requests):
            name = f"{self._served}, request {number}"
            tokens[name] = []
            wanted = self._wanted(min(new, most_new or new))
            lora = self._adapter if number % 2 else None
            engine.add_request(name, {"prompt_token_ids": prefix + prompt}, wanted, lora_request=lora)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id] = [*output.outputs[0].token_ids]
                    cached += output.num_cached_tokens or 0
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": [*tokens.values()], "cached": cached, "drafts": self._drafts()}

    def _drafts(self) -> list[int]:
        if not self.llm.llm_engine.log_stats:
            return []
        counted = {one.name: one.value for one in self.llm.get_metrics() if hasattr(one, "value")}
        return [counted.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in ("draft", "accepted")]

    def _wanted(self, tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        last = RequestOutputKind.FINAL_ONLY
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=last)


def register(architecture: str) -> None:
    """Name the class of a model to vLLM, which would start a second Python to look at it."""
    import importlib

    from vllm import ModelRegistry

    module = importlib.import_module(f"vllm.model_executor.models.{CLASSES[architecture]}")
    ModelRegistry.register_model(architecture, getattr(module, architecture))


def speculation(wanted: str, config: dict[str, Any], folder: Path, backend: str | None) -> dict[str, Any]:
    """Return vLLM's settings of ``ngram:TOKENS`` or ``eagle:TOKENS``; write a head of one layer for the latter."""
    method, _, drafts = wanted.partition(":")
    found = {"method": method, "num_speculative_tokens": int(drafts)}
    if method == "ngram":
        return found | {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    register("EagleLlamaForCausalLM")
    head = {name: value for name, value in config.items() if name != "layer_types"} | {"num_hidden_layers": 1}
    (folder / "eagle").mkdir()
    (folder / "eagle" / "config.json").write_text(json.dumps(head))
    return found | {"model": str(folder / "eagle")} | ({"attention_backend": backend} if backend else {})


def adapter(config: dict[str, Any], folder: Path) -> Any:
    """Write a random LoRA adapter of a Llama's attention; return vLLM's request for it."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    hidden, size = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {"q": (hidden, heads), "k": (hidden, kv_heads), "v": (hidden, kv_heads), "o": (heads, hidden)}
    draw, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (wide, out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, wide, generator=draw) * SPREAD
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK, generator=draw) * SPREAD
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": [f"{n}_proj" for n in shapes]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return LoRARequest("random", 1, str(folder))


def answer(job: dict[str, Any], pipe: Connection) -> None:
    """Run one arm in this process: start its engine when the pipe says something, then serve what else it says."""
    os.environ |= job.get("variables", {})
    import torch  # noqa: F401  before the first word: until then all arms start at once
    import vllm  # noqa: F401

    pipe.recv()
    began = time.perf_counter()
    engine = Engine(job)
    layers = engine.llm.collective_rpc(layers_of)[0]
    pipe.send({"layers": layers, "took": time.perf_counter() - began})
    while True:
        method, *arguments = pipe.recv()
        pipe.send(getattr(engine, method)(*arguments))


if __name__ == "__main__":
    answer(json.loads(sys.argv[2]), Connection(int(sys.argv[1])))
