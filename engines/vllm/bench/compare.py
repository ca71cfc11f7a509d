"""Decode throughput and outputs of the real vLLM engine with attn-select's choice and with vLLM's own, on one GPU.

    python compare.py mla --other TRITON_MLA    # MLA, 16 heads; by attn-select's rules, and by TRITON_MLA
    python compare.py gpt-oss --repeats 8       # sinks in all layers, a window of 128 in every other one; TRITON_ATTN
    python compare.py llama                     # attn-select's own rules
    python compare.py mla --prefer FLASHMLA     # told to prefer another; several, separated by commas, are an arm each
    python compare.py mla --rules my.toml       # other rules; --workload 64q1s6k lets measurements decide instead
    python compare.py mla gpt-oss               # engines of both start together, and are measured one after another

Every arm is an engine in a process of its own, all of them at once on the GPU, so that rounds alternate: in each round
every arm in turn decodes the same batch. Weights are random (norms are 1) and prompts are token ids. Their keys and
values but the last token's are kept by prefix caching, so that a round is decodes alone; the time of a round with one
token is taken off. Printed are the log blocks of attn-select, per arm the decode tokens per second (median and
range), the ratio to the first arm per round, and the share of attention in the kernels' time.

Outputs are compared with the first arm's on the same tokens: of the prompts' prefill, of one decoded token of all
requests, and of one of five requests in a graph of the whole batch. The first layer's attention has equal inputs in all
arms; logits are teacher-forced. With --other the same is printed for two of vLLM's own backends, and the ratio to it.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
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
ARMS = {"mla": ",TRITON_MLA", "gpt-oss": "TRITON_ATTN", "llama": ""}
"""attn-select's arms: the backends that it is told to prefer in a model, separated by commas. Empty: its own rules."""
CACHE_GIB = {"llama": 28, "gpt-oss": 16, "mla": 10}
"""Size of an arm's KV cache: what the default batch and context take."""
OTHERS = {"mla": "TRITON_MLA", "gpt-oss": "TRITON_ATTN", "llama": "TRITON_ATTN"}
"""The backend of vLLM that ``--other`` means where none is named."""
ATTENTION = re.compile(r"attn|attention|flash|mla|decode|combine|split|xqa|paged", re.IGNORECASE)
"""Kernels whose names contain this are counted as attention's."""
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


def worker(job: dict[str, Any]) -> None:
    """Run one arm: an engine that decodes when it is told to by a line on its standard input."""
    import importlib

    import torch
    from vllm import LLM, ModelRegistry, SamplingParams

    sys.stdin.readline()  # until now all arms start at once
    random_weights(job["model"] == "gpt-oss")
    keep_first_layer()
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
        gpu_memory_utilization=0.1,  # arms start at once: what is free says nothing
        kv_cache_memory_bytes=job["cache_gib"] << 30,
        compilation_config=graphs,
        enable_prefix_caching=True,
        seed=0,
        disable_log_stats=True,
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    shape = (job["batch"], job["context"] // BLOCK * BLOCK + 1)
    prompts = torch.randint(3, 31999, shape, generator=generator).tolist()

    def decode(tokens: int, prompts: Any = prompts) -> float:
        wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": row} for row in prompts], wanted, use_tqdm=False)
        return time.perf_counter() - start

    def answer(**values: Any) -> None:
        print("BENCH " + json.dumps(values), flush=True)

    llm.collective_rpc(keep_logits)
    few = [row[: -4 * BLOCK - 2 : -1] for row in prompts[:FEW]]
    prefill, kept = decode(1), {"prefill": taken(0)}
    decode(1)
    kept["decode"] = taken(job["batch"])
    decode(1, few)
    kept["short prefill"] = taken(0)
    decode(1, few)
    kept["padded decode"] = taken(FEW)
    torch.save(kept, folder / "kept.pt")
    llm.collective_rpc(forget_logits)
    answer(layers=llm.collective_rpc(layers_of)[0], prefill=prefill, kept=str(folder / "kept.pt"))
    for line in sys.stdin:
        if line.strip() == "round":
            alone, whole = decode(1), decode(1 + job["tokens"])
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
        self.name, self.log = name, log
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
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
        atexit.register(self.process.kill)
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def _listen(self) -> None:
        """Write the process's output to the log, and keep its answers; None follows the last."""
        assert self.process.stdout is not None
        with self.log.open("w") as log:
            for said in self.process.stdout:
                log.write(said)
                if said.startswith("BENCH "):
                    log.flush()
                    self._answers.put(json.loads(said[6:]))
                elif "hook.py" in said or "takes no part" in said:
                    print(f"{self.name}: {said.partition('] ')[2].rstrip()}", flush=True)
        self._answers.put(None)

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to a line."""
        answer = self._answers.get()
        if answer is None:
            raise SystemExit(f"{self.name} ended; the end of its output:\n{self.log.read_text()[-4000:]}")
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        self.say(line)
        return self.answer()

    def end(self) -> None:
        self.process.kill()


def attn_select_arms(model: str, options: argparse.Namespace, folder: Path) -> dict[str, dict[str, str]]:
    """Return by name the environment of each of attn-select's arms."""
    found = {"VLLM_PLUGINS": "attn_select"}
    if options.workload:
        return {"attn-select": found | {"ATTN_SELECT_WORKLOAD": options.workload}}
    if options.rules:
        return {"attn-select": found | {"ATTN_SELECT_RULES": str(options.rules)}}
    arms = {}
    for backend in (ARMS[model] if options.prefer is None else options.prefer).split(","):
        variables = dict(found)
        if backend:
            rules = folder / f"{backend}.toml"
            phase = 'phase = "decode"\n' if model == "mla" else ""
            rules.write_text(f'version = 1\n[[rules]]\nname = "bench"\n{phase}prefer = ["{backend}"]\n')
            variables["ATTN_SELECT_RULES"] = str(rules)
        arms[f"attn-select {backend}".rstrip()] = variables
    return arms


def differences(first: Path, other: Path) -> dict[str, tuple[float, float]]:
    """Return by case how far two arms' outputs are apart: norm of the difference by the first's, and the largest."""
    import torch

    ours, theirs = torch.load(first), torch.load(other)
    found = {}
    for case, outputs in ours.items():
        for what, one in outputs.items():
            if one.numel():
                if one.shape != theirs[case][what].shape:
                    raise SystemExit(f"{what}, {case}: {one.shape} beside {theirs[case][what].shape}")
                gap = one - theirs[case][what]
                found[f"{what}, {case}"] = (float(gap.norm() / one.norm()), float(gap.abs().max()))
    return found


def report_rates(rates: dict[str, list[float]]) -> None:
    """Print the arms' decode tokens per second and, per round, their ratio to the first arm's."""
    base = next(iter(rates.values()))
    for name, own in rates.items():
        ratios = [rate / first for rate, first in zip(own, base, strict=True)]
        print(
            f"  {name:<26} {statistics.median(own):9.0f} decode tokens/s ({min(own):.0f} to {max(own):.0f}), "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


def report_differences(kept: dict[str, Path], other: str) -> None:
    """Print how far the arms' outputs are from the first arm's, and the ratio to those of the arm ``other``."""
    first, *rest = kept
    apart = {name: differences(kept[first], kept[name]) for name in rest}
    own = apart.get(other, {})
    print(f"\napart from {first}: norm of the difference by its own, largest difference")
    for case in apart[rest[-1]]:
        for name, found in apart.items():
            norm, largest = found[case]
            ratio = f", {norm / max(own[case][0], 1e-9):.2f} times vLLM's own two" if case in own else ""
            print(f"  {case:<28} {name:<26} {norm:.2e}, {largest:.2e}{ratio}")


def arms_of(model: str, options: argparse.Namespace) -> list[Arm]:
    """Start the processes of a model's arms: vLLM's choice, another backend of vLLM, attn-select."""
    wanted: dict[str, tuple[str | None, dict[str, str]]] = {"vLLM": (None, {"VLLM_PLUGINS": ""})}
    if options.other is not None:
        other = options.other or OTHERS[model]
        wanted[f"vLLM {other}"] = (other, {"VLLM_PLUGINS": ""})
    for name, variables in attn_select_arms(model, options, Path(tempfile.mkdtemp())).items():
        wanted[name] = (None, variables)
    job = {name: getattr(options, name) for name in ("batch", "context", "tokens", "kv_cache_dtype")}
    job |= {"model": model, "cache_gib": CACHE_GIB[model]}
    return [
        Arm(name, job | {"backend": backend}, variables, options.logs / f"{model}-{name.replace(' ', '-')}.log")
        for name, (backend, variables) in wanted.items()
    ]


def compare(model: str, arms: list[Arm], options: argparse.Namespace) -> None:
    """Run the rounds of one model and print what they say; ends the arms."""
    rates: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(options.repeats + 1):
        for arm in arms if number % 2 else arms[::-1]:
            rate = arm.ask("round")["rate"]
            if number:  # the first warms up
                rates[arm.name].append(rate)
    print(f"\n{model}: {options.batch} requests of about {options.context} tokens, {options.tokens} decoded each")
    report_rates(rates)
    for arm in arms:
        seen = arm.ask("share")
        print(f"  {arm.name:<26} attention {seen['share']:.0%} of the kernels' time: {seen['top']}", flush=True)
        arm.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--batch", type=int, default=64, help="requests (default: 64)")
    parser.add_argument("--context", type=int, default=6000, help="about so many tokens of a prompt (default: 6000)")
    parser.add_argument("--tokens", type=int, default=256, help="decoded per request and round (default: 256)")
    parser.add_argument("--repeats", type=int, default=8, help="rounds (default: 8)")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--rules", type=Path, help="attn-select's rules instead of a preference")
    parser.add_argument("--prefer", metavar="NAME,…", help="attn-select's backends to prefer, an arm each; empty: none")
    parser.add_argument("--workload", help="let attn-select's measurements decide for this workload")
    parser.add_argument(
        "--other",
        nargs="?",
        const="",
        metavar="NAME",
        help="one more arm: this backend of vLLM (default: a Triton one)",
    )
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
        return
    options = parser.parse_args()
    began = time.monotonic()
    arms = {model: arms_of(model, options) for model in options.models}
    kept: dict[str, dict[str, Path]] = {}
    for arm in [arm for own in arms.values() for arm in own]:
        arm.say("start")
    for model, own in arms.items():
        starts = {}
        for arm in own:
            start = starts[arm.name] = arm.answer()
            print(f"{arm.name}: layers {start['layers']}, first prefill {start['prefill']:.1f} s", flush=True)
        kept[model] = {name: Path(start["kept"]) for name, start in starts.items()}
    print(f"{time.monotonic() - began:.0f} s until all engines had started", flush=True)
    for model, own in arms.items():
        compare(model, own, options)
        report_differences(kept[model], f"vLLM {options.other or OTHERS[model]}")
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
