"""Decode throughput and outputs of the real vLLM engine with attn-select's choice and with vLLM's own, on one GPU.

    python compare.py mla --other TRITON_MLA         # MLA, 16 heads
    python compare.py gpt-oss                        # sinks in all layers, a window of 128 in every other one
    python compare.py llama --batches 64x6000,8x32000
    python compare.py mla --prefer ,TRITON_MLA       # by attn-select's own rules, and told to prefer another
    python compare.py mla --rules my.toml            # other rules; --workload 64q1s6k lets measurements decide instead
    python compare.py mla gpt-oss llama              # engines start together while their caches fit --memory

Every arm is an engine in a process of its own, so that arms alternate: in each round every arm in turn decodes the same
batch for ``--steps`` steps of its engine. Contexts grow by a token a step, in all arms alike, and nothing is prefilled
between rounds. Weights are random (norms are 1) and prompts are token ids.

Printed are the log blocks of attn-select and, per batch and arm, the milliseconds of a step (median over the rounds)
and of its kernels (in a profile after them, each kernel by itself), the decode tokens per second and the ratio of these
to the first arm's: the median over the rounds, each a pair measured one after the other, with a 95 % interval that
assumes no distribution, and the range. Then the share of attention in the kernels' time.

Outputs are compared with the first arm's on the same tokens: of the prompts' prefill, of one decoded token of all
requests, and of one of five requests in a graph of the whole batch. The first layer's attention has equal inputs in all
arms; logits are teacher-forced. With --other the same is printed for two of vLLM's own backends, and the ratio to it.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import math
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
from typing import Any, NoReturn

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
CLASSES = {"LlamaForCausalLM": "llama", "DeepseekV2ForCausalLM": "deepseek_v2"}
BATCHES = {"mla": "64x6000,128x2000,256x1000", "gpt-oss": "64x6000,128x2000", "llama": "64x6000"}
"""Requests and tokens of each, of the batches that are decoded one after another; outputs are those of the first."""
CACHE_GIB = {"llama": 28, "gpt-oss": 30, "mla": 20}
"""Size of an arm's KV cache: what the default batches take."""
BESIDE_GIB = 8
"""What an arm takes beside its cache, at most: weights, activations, workspaces, CUDA's own."""
WARM_STEPS = 2
"""Steps of a round that are not timed: the first waits for the host alone."""
OTHERS = {"mla": "TRITON_MLA", "gpt-oss": "TRITON_ATTN", "llama": "TRITON_ATTN"}
"""The backend of vLLM that ``--other`` means where none is named."""
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
        keep_first_layer()
        config = {**COMMON, **MODELS[job["model"]]}
        (name,) = config["architectures"]
        module = importlib.import_module(f"vllm.model_executor.models.{CLASSES[name]}")
        ModelRegistry.register_model(name, getattr(module, name))  # else a second Python would look at it
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "config.json").write_text(json.dumps(config))
        requests = [batch for batch, _ in job["batches"]]
        longest = max(context for _, context in job["batches"])
        sizes = sorted({1, *requests})
        self.llm = LLM(
            str(self.folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
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
        for _ in range(WARM_STEPS):
            self.llm.llm_engine.step()
        start = time.perf_counter()
        for _ in range(count):
            self.llm.llm_engine.step()  # returns with the tokens of a step, while the next one runs
        took = time.perf_counter() - start
        torch.cuda.synchronize()
        done, wanted = self._computed() - before, (count + WARM_STEPS) * len(self._scheduler.running)
        if done != wanted:
            raise SystemExit(f"{done} tokens were decoded in place of {wanted}")
        return took

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
            found["kept"] = str(keep_outputs(engine, *job["batches"][0]))
        elif engine is None:
            raise SystemExit(f"{word} before start")
        elif word == "fill":
            engine.fill(*map(int, numbers))
        elif word == "steps":
            found["seconds"] = engine.steps(int(numbers[0]))
        elif word == "share":
            found |= engine.share()
        print("BENCH " + json.dumps(found | {"took": time.perf_counter() - began}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # no wait for the threads that the engine leaves


class ArmError(Exception):
    """An arm's process ended before it was told to."""


class Arm:
    """One engine in a process of its own; its whole output goes to a file."""

    def __init__(self, name: str, job: dict[str, Any], variables: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._start: dict[str, Any] | None = None
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

    def wait(self) -> None:
        """Wait until the engine has started, or has ended."""
        if self._start is None:
            self._start = self._answers.get() or {}

    def started(self) -> dict[str, Any]:
        """Return the answer to the line that started the engine."""
        self.wait()
        return self._start or self._ended()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to a line."""
        return self._answers.get() or self._ended()

    def _ended(self) -> NoReturn:
        raise ArmError(f"{self.name} ended; the end of its output:\n{self.log.read_text()[-4000:]}")

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        self.say(line)
        return self.answer()

    def end(self) -> None:
        """End the process, so that its memory is free."""
        self.process.kill()
        self.process.wait()


def attn_select_arms(model: str, options: argparse.Namespace, folder: Path) -> dict[str, dict[str, str]]:
    """Return by name the environment of each of attn-select's arms."""
    found = {"VLLM_PLUGINS": "attn_select"}
    if options.workload:
        return {"attn-select": found | {"ATTN_SELECT_WORKLOAD": options.workload}}
    if options.rules:
        return {"attn-select": found | {"ATTN_SELECT_RULES": str(options.rules)}}
    arms = {}
    for backend in options.prefer.split(","):
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


def middle(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median and a 95 % interval of it, which assumes no distribution: two of the ordered values.

    As many values as possible are left out at each end, so that the median lies outside in at most 2.5 % of samples.
    With fewer than six no such interval exists, and the range is returned.
    """
    ordered, count = sorted(ratios), len(ratios)
    outside, below = 0, 0.0
    while (below := below + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    low = max(0, outside - 1)
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]


def report_rates(seconds: dict[str, list[float]], batch: int, steps: int, busy: dict[str, float]) -> None:
    """Print the arms' times of a step, tokens per second and, per round, their ratio to the first arm's."""
    base = next(iter(seconds.values()))
    for name, own in seconds.items():
        step = statistics.median(own) / steps
        ratios = [first / spent for spent, first in zip(own, base, strict=True)]
        line = f"  {name:<26} {step * 1e3:7.3f} ms a step, kernels {busy[name]:7.3f}, {batch / step:7.0f} tokens/s"
        if own is not base:
            ratio, low, high = middle(ratios)
            line += f", ratio {ratio:.3f} ({low:.3f} to {high:.3f}; range {min(ratios):.3f} to {max(ratios):.3f})"
        print(line)


def report_differences(kept: dict[str, Path], other: str) -> None:
    """Print how far the arms' outputs are from the first arm's, and the ratio to those of the arm ``other``."""
    first, *rest = kept
    apart = {name: differences(kept[first], kept[name]) for name in rest}
    own = apart.get(other, {})
    print(f"\napart from {first}: norm of the difference by its own, largest difference")
    for case in apart[rest[-1]]:
        for name, found in apart.items():
            norm, largest = found[case]
            theirs = own[case][0] if case in own else 0.0
            ratio = f", {norm / theirs:.2f} times vLLM's own two" if theirs else ""
            print(f"  {case:<28} {name:<26} {norm:.2e}, {largest:.2e}{ratio}")


def arms_of(model: str, options: argparse.Namespace) -> list[Arm]:
    """Start the processes of a model's arms: vLLM's choice, another backend of vLLM, attn-select."""
    wanted: dict[str, tuple[str | None, dict[str, str]]] = {"vLLM": (None, {"VLLM_PLUGINS": ""})}
    if other := other_of(model, options):
        wanted[f"vLLM {other}"] = (other, {"VLLM_PLUGINS": ""})
    for name, variables in attn_select_arms(model, options, Path(tempfile.mkdtemp())).items():
        wanted[name] = (None, variables)
    job = {
        "model": model,
        "batches": batches_of(model, options),
        "kv_cache_dtype": options.kv_cache_dtype,
        "block_size": options.block_size,
        "cache_gib": options.cache_gib or CACHE_GIB[model],
        "most_steps": (options.steps + WARM_STEPS) * (options.rounds + 4) + BLOCK,
    }
    return [
        Arm(name, job | {"backend": backend}, variables, options.logs / f"{model}-{name.replace(' ', '-')}.log")
        for name, (backend, variables) in wanted.items()
    ]


def other_of(model: str, options: argparse.Namespace) -> str | None:
    """Return vLLM's name of the backend of one more arm, if a model is to have it."""
    if options.other is None:
        return None
    named = [name for name in options.other if ("MLA" in name) == (model == "mla")]
    return named[0] if named else None if options.other else OTHERS[model]


def batches_of(model: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return requests and context of each batch that a model decodes."""
    found = []
    for batch in (options.batches or BATCHES[model]).split(","):
        if not (read := re.fullmatch(r"(\d+)x(\d+)", batch)):
            raise SystemExit(f"--batches: {batch!r} is not REQUESTSxTOKENS, such as 64x6000")
        found.append((int(read[1]), int(read[2])))
    return found


def together(arms: list[Arm], line: str) -> list[dict[str, Any]]:
    """Send all arms a line, and wait for all answers."""
    for arm in arms:
        arm.say(line)
    return [arm.answer() for arm in arms]


def compare(model: str, arms: list[Arm], batch: int, context: int, options: argparse.Namespace) -> None:
    """Run the rounds of one batch and print what they say."""
    together(arms, f"fill {batch} {context}")
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(options.rounds + 1):
        for arm in arms if number % 2 else arms[::-1]:
            spent = arm.ask(f"steps {options.steps}")["seconds"]
            if number:  # the first warms up
                seconds[arm.name].append(spent)
    shares = {arm.name: arm.ask("share") for arm in arms}
    print(f"\n{model}: {batch} requests of {context} tokens, {options.rounds} rounds of {options.steps} steps")
    report_rates(seconds, batch, options.steps, {name: found["busy_ms"] for name, found in shares.items()})
    for name, found in shares.items():
        top = ", ".join(f"{key} {part:.0%}{' *' if own else ''}" for key, part, own in found["top"])
        print(f"  {name:<26} attention (*) {found['share']:.0%} of the kernels' time: {top}", flush=True)


def measure(model: str, arms: list[Arm], options: argparse.Namespace) -> None:
    """Measure and compare the arms of a model, whose engines have been told to start.

    Raises:
        ArmError: an arm ended.
    """
    starts = {arm.name: arm.started() for arm in arms}
    for name, start in starts.items():
        print(f"{name}: layers {start['layers']}, {start['took']:.0f} s to start", flush=True)
    for batch, context in batches_of(model, options):
        compare(model, arms, batch, context, options)
    report_differences(
        {name: Path(start["kept"]) for name, start in starts.items()}, f"vLLM {other_of(model, options)}"
    )


def needs(models: list[str], live: dict[str, list[Arm]], options: argparse.Namespace) -> int:
    """Return the GiB that the engines of models take together, at most."""
    return sum(len(live[model]) * ((options.cache_gib or CACHE_GIB[model]) + BESIDE_GIB) for model in models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument(
        "--batches", metavar="REQUESTSxTOKENS,…", help=f"decoded one after another (default: {BATCHES})"
    )
    parser.add_argument("--steps", type=int, default=16, help="timed steps of an arm in a round (default: 16)")
    parser.add_argument("--rounds", type=int, default=24, help="default: 24")
    parser.add_argument("--memory", type=int, default=132, help="GiB that engines may take at a time (default: 132)")
    parser.add_argument("--cache-gib", type=int, help=f"size of an arm's KV cache (default: {CACHE_GIB})")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--block-size", type=int, help="of all arms' caches (default: the backend's own)")
    parser.add_argument("--rules", type=Path, help="attn-select's rules instead of a preference")
    parser.add_argument(
        "--prefer",
        default="",
        metavar="NAME,…",
        help="attn-select's backends to prefer, an arm each; empty: its own rules (default)",
    )
    parser.add_argument("--workload", help="let attn-select's measurements decide for this workload")
    parser.add_argument(
        "--other",
        nargs="*",
        metavar="NAME",
        help="one more arm: this backend of vLLM, for the models that it serves (none named: a Triton one for all)",
    )
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
        return
    options = parser.parse_args()
    began = time.monotonic()
    live = {model: arms_of(model, options) for model in options.models}
    waiting = list(live)
    started: list[str] = []
    for model in options.models:
        while waiting and (waiting[0] == model or needs([*started, waiting[0]], live, options) <= options.memory):
            started.append(waiting.pop(0))
            for arm in live[started[-1]]:
                arm.say("start")
        for arm in [arm for other in started for arm in live[other]]:
            arm.wait()  # an engine that starts would disturb those that are measured
        print(f"{time.monotonic() - began:.0f} s until {', '.join(started)} had started", flush=True)
        try:
            measure(model, live[model], options)
        except ArmError as error:  # the next model is measured all the same
            print(f"{model}: {error}", flush=True)
        for arm in live[model]:
            arm.end()
        started.remove(model)
        print(f"{time.monotonic() - began:.0f} s until {model} was measured", flush=True)


if __name__ == "__main__":
    main()
