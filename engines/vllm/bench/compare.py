"""Decode throughput of the real vLLM engine with attn-select's choice and with vLLM's own, side by side on one GPU.

    python compare.py mla                       # MLA, 16 heads; attn-select told to prefer FLASHINFER_MLA
    python compare.py gpt-oss --repeats 8       # sinks in all layers, a window of 128 in every other one; TRITON_ATTN
    python compare.py llama --other TRITON_ATTN # attn-select's own rules, and one more of vLLM's backends beside them
    python compare.py mla --rules my.toml       # other rules; --workload 128q1s6k lets measurements decide instead

Every arm is an engine in a process of its own, all of them at once on the GPU, so that rounds alternate: in each round
every arm in turn decodes the same batch. Weights are random (norms are 1) and prompts are token ids. Their keys and
values are kept by prefix caching, so that a round is a short prefill and then decodes alone; the time of a round with
one token is taken off. Printed are the log blocks of attn-select, per arm the decode tokens per second (median and
range), the ratio to the first arm per round, the share of attention in the kernels' time, and how far the
log-probabilities are apart while the greedy tokens agree.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
MODELS: dict[str, dict[str, Any]] = {
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
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 20,
        "first_k_dense_replace": 20,
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
CLASSES = {"LlamaForCausalLM": "llama", "DeepseekV2ForCausalLM": "deepseek_v2"}
PREFERRED = {
    "mla": ("FLASHINFER_MLA", "{ mla = true }"),
    "gpt-oss": ("TRITON_ATTN", "{ sinks = true }"),
}
"""What attn-select is told to prefer in a model, and where. A model that is not here runs by the packaged rules."""
ATTENTION = re.compile(r"attn|attention|flash|mla|decode|combine|split|xqa|paged", re.IGNORECASE)
"""Kernels whose names contain this are counted as attention's."""
COMPARED = 16
"""Tokens whose log-probabilities are compared."""


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


def layers_of(worker: Any) -> dict[str, int]:
    """Count the layers of a worker by the backend that runs them."""
    counts: dict[str, int] = {}
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "attn_backend"):
            name = layer.attn_backend.get_name()
            counts[name] = counts.get(name, 0) + 1
    return counts


def worker(job: dict[str, Any]) -> None:
    """Run one arm: an engine that decodes when it is told to by a line on its standard input."""
    import importlib

    import torch
    from vllm import LLM, ModelRegistry, SamplingParams

    sys.stdin.readline()  # until now all arms start at once
    random_weights(job["model"] == "gpt-oss")
    config = {**COMMON, **MODELS[job["model"]]}
    (name,) = config["architectures"]
    module = importlib.import_module(f"vllm.model_executor.models.{CLASSES[name]}")
    ModelRegistry.register_model(name, getattr(module, name))  # else a second Python would look at it
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, job["batch"]]}
    options = {"attention_backend": job["backend"]} if job["backend"] else {}
    llm = LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=job["kv_cache_dtype"],
        max_model_len=job["context"] + 512,
        max_num_seqs=job["batch"],
        gpu_memory_utilization=job["memory"],
        compilation_config=graphs,
        enable_prefix_caching=True,
        seed=0,
        disable_log_stats=True,
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    shape = (job["batch"], job["context"])
    prompts = [{"prompt_token_ids": row} for row in torch.randint(3, 31999, shape, generator=generator).tolist()]

    def decode(tokens: int, **sampling: Any) -> tuple[float, Any]:
        wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = llm.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - start, outputs

    def answer(**values: Any) -> None:
        print("BENCH " + json.dumps(values), flush=True)

    prefill, _ = decode(1)
    _, outputs = decode(COMPARED, logprobs=0)
    chosen = [(list(o.outputs[0].token_ids), o.outputs[0].logprobs) for o in outputs]
    logprobs = [[row[token].logprob for token, row in zip(tokens, rows, strict=True)] for tokens, rows in chosen]
    answer(layers=llm.collective_rpc(layers_of)[0], prefill=prefill, tokens=[t for t, _ in chosen], logprobs=logprobs)
    for line in sys.stdin:
        if line.strip() == "round":
            alone, whole = decode(1)[0], decode(1 + job["tokens"])[0]
            answer(rate=job["batch"] * job["tokens"] / (whole - alone))
        elif line.strip() == "share":
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                decode(9)
            times = {event.key: event.self_device_time_total for event in profile.key_averages()}
            attention = {key: spent for key, spent in times.items() if ATTENTION.search(key)}
            top = sorted(times, key=lambda key: times[key], reverse=True)[:5]
            share = sum(attention.values()) / max(1.0, sum(times.values()))
            answer(share=share, top=[[key[:70], times[key] / max(1.0, sum(times.values()))] for key in top])
    sys.stdout.flush()
    os._exit(0)  # no wait for the threads that the engine leaves


class Arm:
    """One engine in a process of its own; its whole output goes to a file."""

    def __init__(self, name: str, job: dict[str, Any], variables: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log.open("w")
        fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(job)],
            env=os.environ | fixed | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        for said in self.process.stdout:
            self.log.write(said)
            if said.startswith("BENCH "):
                answer: dict[str, Any] = json.loads(said[6:])
                return answer
            if "hook.py" in said or "takes no part" in said:
                print(f"{self.name}: {said.partition('] ')[2].rstrip()}", flush=True)
        self.log.close()
        raise SystemExit(f"{self.name} ended; the end of its output:\n{Path(self.log.name).read_text()[-4000:]}")

    def end(self) -> None:
        self.process.kill()


def variables_of(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return the environment of attn-select's arm."""
    found = {"VLLM_PLUGINS": "attn_select", "ATTN_SELECT_ANY_VERSION": "1"}
    if options.workload:
        return found | {"ATTN_SELECT_WORKLOAD": options.workload}
    if options.rules:
        return found | {"ATTN_SELECT_RULES": str(options.rules)}
    if options.model in PREFERRED:
        backend, where = PREFERRED[options.model]
        rules = folder / "prefer.toml"
        rules.write_text(f'version = 1\n[[rules]]\nname = "bench"\nwhen = {where}\nprefer = ["{backend}"]\n')
        return found | {"ATTN_SELECT_RULES": str(rules)}
    return found


def apart(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Say how far two arms' log-probabilities are apart at the tokens before the first that differs."""
    gaps, agreed = [], 0
    for tokens, others, ours, theirs in zip(
        first["tokens"], other["tokens"], first["logprobs"], other["logprobs"], strict=True
    ):
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        agreed += same
        gaps += [abs(a - b) for a, b in zip(ours[:same], theirs[:same], strict=True)]
    total = sum(map(len, first["tokens"]))
    if not gaps:
        return f"0 of {total} tokens equal before the first difference"
    gap = f"there median gap {statistics.median(gaps):.2g}, largest {max(gaps):.2g}"
    return f"{agreed} of {total} tokens equal before the first difference; {gap}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--batch", type=int, help="requests (default: 64, 128 of MLA and gpt-oss)")
    parser.add_argument("--context", type=int, default=6000, help="tokens of a prompt (default: 6000)")
    parser.add_argument("--tokens", type=int, default=64, help="decoded per request and round (default: 64)")
    parser.add_argument("--repeats", type=int, default=8, help="rounds (default: 8)")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rules", type=Path, help="attn-select's rules instead of the preference of this model")
    parser.add_argument("--workload", help="let attn-select's measurements decide for this workload")
    parser.add_argument("--other", metavar="NAME", help="one more arm: this backend of vLLM")
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
        return
    options = parser.parse_args()
    options.batch = options.batch or (64 if options.model == "llama" else 128)
    began = time.monotonic()
    arms_wanted: dict[str, tuple[str | None, dict[str, str]]] = {"vLLM": (None, {"VLLM_PLUGINS": ""})}
    if options.other:
        arms_wanted[f"vLLM {options.other}"] = (options.other, {"VLLM_PLUGINS": ""})
    arms_wanted["attn-select"] = (None, variables_of(options, Path(tempfile.mkdtemp())))
    fields = {name: getattr(options, name) for name in ("model", "batch", "context", "tokens", "kv_cache_dtype")}
    arms: list[Arm] = []
    starts: dict[str, dict[str, Any]] = {}
    for name, (backend, variables) in arms_wanted.items():
        job = fields | {"backend": backend, "memory": round(0.86 / len(arms_wanted), 3)}
        arms.append(Arm(name, job, variables, options.logs / f"{options.model}-{name.replace(' ', '-')}.log"))
    for arm in arms:  # one after another: an engine measures the memory that is free
        start = starts[arm.name] = arm.ask("start")
        print(f"{arm.name}: layers {start['layers']}, first prefill {start['prefill']:.1f} s", flush=True)
    rates: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(options.repeats + 1):
        for arm in arms if number % 2 else arms[::-1]:
            rate = arm.ask("round")["rate"]
            if number:  # the first warms up
                rates[arm.name].append(rate)
    print(f"\n{options.model}: {options.batch} requests of {options.context} tokens, {options.tokens} decoded each")
    first = arms[0].name
    for arm in arms:
        own = rates[arm.name]
        ratios = [rate / base for rate, base in zip(own, rates[first], strict=True)]
        print(
            f"  {arm.name:<22} {statistics.median(own):9.0f} decode tokens/s ({min(own):.0f} to {max(own):.0f}), "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    for arm in arms:
        seen = arm.ask("share")
        print(f"  {arm.name:<22} attention {seen['share']:.0%} of the kernels' time: {seen['top']}")
        if arm is not arms[0]:
            print(f"  {arm.name:<22} {apart(starts[first], starts[arm.name])}")
        arm.end()
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
