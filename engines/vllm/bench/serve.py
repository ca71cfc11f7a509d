"""Whole serving runs of the real vLLM engine with attn-select's choice and with vLLM's own, in turns on one GPU.

    python serve.py llama rank gpt-oss gemma2 mla mla-128 narrow
    python serve.py llama --kinds mixed,decode-heavy --rounds 6
    python serve.py llama --also ATTN_SELECT_FLASH_ATTN_TRITON_ATTN,TRITON_ATTN
    python serve.py llama --speculate ngram:3        # all arms; or eagle:3, by a head of random weights
    python serve.py tiny --requests 6 --longest 60   # on a CPU

The arms are vLLM's choice, attn-select's (``ATTN_SELECT_RULES`` and ``ATTN_SELECT_WORKLOAD`` count), and every backend
of ``--also``: one of attn-select's, or one of vLLM's as the yardstick of tokens.

Every arm is an engine in a process of its own. In each round every arm in turn gets the same drawn requests at once and
serves them to the end: prompts of 64 to 12,000 tokens (log-normal), prefills and decodes in one step as its scheduler
mixes them. The first round of a kind warms up. Weights are random, and no prompt comes twice.

Printed are per model and kind the generated tokens per second (median over the rounds), the ratio to vLLM's own choice
(median and range of the rounds' ratios), the share of greedy tokens before the first difference from vLLM's, and the
seconds that each engine took to start; at the end the geometric mean of the ratios of each kind.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from serve_arms import BASE, Arm, ArmError, arm_names
from serve_engine import MODELS
from serve_profile import told
from serve_requests import KINDS, agreement, drawn

SERVED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""As ``vllm serve`` runs an engine: its core in a process of its own, which answers what its layers run on."""
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Requests of captured decodes; as many run at a time."""


def arms_of(model: str, options: argparse.Namespace) -> list[Arm]:
    """Start the processes of a model's arms: vLLM's choice, attn-select's, and the backends of ``--also`` for it."""
    job = {
        "model": model,
        "longest": options.longest or max(traffic.longest + traffic.new[1] for traffic in KINDS.values()),
        "sizes": SIZES,
        "speculate": options.speculate,
        "cache_gib": options.cache_gib,
        "variables": {} if options.profile else SERVED,
        "options": {"kv_cache_dtype": options.kv_cache_dtype},
    }
    names = arm_names(model, options.also)
    return [Arm(name, job, options.logs / f"serve-{model}-{name}.log") for name in names]


def serve(model: str, kind: str, arms: list[Arm], options: argparse.Namespace) -> dict[str, float]:
    """Run the rounds of one kind of traffic, print what they say, and return each arm's ratio to vLLM's choice."""
    rates: dict[str, list[float]] = {arm.name: [] for arm in arms}
    agreed: dict[str, list[float]] = {arm.name: [] for arm in arms}
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(options.rounds + 1):
        served: dict[str, Any] = {}
        for arm in arms if number % 2 else arms[::-1]:
            served[arm.name] = arm.ask("serve", kind, options.seed + number, options.requests, options.longest)
        if number:  # the first warms up
            for name, found in served.items():
                seconds[name].append(found["seconds"])
                rates[name].append(sum(map(len, found["tokens"])) / found["seconds"])
                agreed[name].append(agreement(served[BASE]["tokens"], found["tokens"]))
    prompts = sum(len(prompt) for prompt, _ in drawn(kind, options.seed, options.requests, options.longest))
    print(f"\n{model}, {kind}: {options.requests} requests of {prompts} prompt tokens, {options.rounds} rounds")
    medians = {}
    for name, own in rates.items():
        ratios = [rate / base for rate, base in zip(own, rates[BASE], strict=True)]
        medians[name] = statistics.median(ratios)
        line = f"  {name:<26} {statistics.median(own):8.0f} tokens/s"
        if name != BASE:
            line += f", ratio {medians[name]:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            line += f", tokens agree to {statistics.median(agreed[name]):.0%}"
        print(line, flush=True)
    for arm in arms if options.profile else ():
        seen = arm.ask("profiled", kind, options.seed + options.rounds, options.requests, options.longest)
        (options.logs / f"kernels-{model}-{kind}-{arm.name}.json").write_text(json.dumps(seen))
        print(f"  {arm.name:<26} {told(seen, statistics.median(seconds[arm.name]))}", flush=True)
    return medians


def measure(model: str, arms: list[Arm], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Start a model's arms one after another and serve every kind; return the ratios by kind and arm."""
    try:
        for arm in arms:
            start = arm.start()
            for line in arm.said():
                print(f"{arm.name}: {line}")
            print(f"{model}, {arm.name}: {start['took']:.1f} s to start, layers {start['layers']}", flush=True)
        return {kind: serve(model, kind, arms, options) for kind in options.kinds.split(",")}
    except ArmError as error:  # the next model is measured all the same
        print(f"{model}: {error}", flush=True)
        return {}
    finally:
        for arm in arms:
            arm.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=sorted(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"default: {','.join(KINDS)}")
    parser.add_argument("--requests", type=int, default=160, help="of a round (default: 160)")
    parser.add_argument("--longest", type=int, help="tokens of a request at most (default: the kind's)")
    parser.add_argument("--rounds", type=int, default=4, help="that count (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the first round's requests (default: 0)")
    parser.add_argument("--speculate", default="", metavar="METHOD:TOKENS", help="drafts of ngram or, of Llamas, eagle")
    parser.add_argument("--cache-gib", type=int, default=24, help="of an arm's KV cache (default: 24)")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--also", default="", metavar="NAME,…", help="backends by vLLM's names, an arm each")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="say where the time goes, by a round more (with the core in the arm's own process)",
    )
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
    options = parser.parse_args()
    if unknown := [kind for kind in options.kinds.split(",") if kind not in KINDS]:
        parser.error(f"--kinds: {unknown[0]!r} is unknown; known are {', '.join(KINDS)}")
    if options.speculate and not re.fullmatch(r"(ngram|eagle):[1-9]\d*", options.speculate):
        parser.error(f"--speculate: {options.speculate!r} is neither ngram:TOKENS nor eagle:TOKENS")
    found: dict[tuple[str, str], list[float]] = {}
    arms = arms_of(options.models[0], options)
    for model, following in zip(options.models, [*options.models[1:], None], strict=True):
        ahead = arms_of(following, options) if following else []  # they import while this model's engines start
        for kind, medians in measure(model, arms, options).items():
            for name, ratio in medians.items():
                if name != BASE:
                    found.setdefault((kind, name), []).append(ratio)
        arms = ahead
    for (kind, name), ratios in found.items():
        mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
        print(f"\n{kind}, {name}: {mean:.3f} in the geometric mean of {len(ratios)} models, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
