"""Decode throughput and outputs of the real vLLM engine with attn-select's choice and with vLLM's own, on one GPU.

    python compare.py mla --other TRITON_MLA         # MLA, 16 heads; mla-128: 128 heads
    python compare.py gpt-oss                        # sinks in all layers, a window of 128 in every other one
    python compare.py llama --batches 64x6000,8x32000
    python compare.py mla --prefer ,TRITON_MLA       # by attn-select's own rules, and told to prefer another
    python compare.py mla --rules my.toml            # other rules; --workload 64q1s6k decides by times for it
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
import os
import re
import tempfile
import time
from pathlib import Path

from compare_arms import Arm, ArmError, together
from compare_engine import BLOCK, MODELS, WARM_STEPS
from compare_report import report_differences, report_rates, report_shares

from attn_select_vllm.names import OWN_PREFIX, PAIRS

BATCHES = {
    "mla": "64x6000,128x2000,256x1000",
    "mla-128": "64x6000,128x2000",
    "gpt-oss": "64x6000,128x2000",
    "llama": "64x6000",
}
"""Requests and tokens of each, of the batches that are decoded one after another; outputs are those of the first."""
CACHE_GIB = {"llama": 28, "gpt-oss": 30, "mla": 20, "mla-128": 16}
"""Size of an arm's KV cache: what the default batches take."""
BESIDE_GIB = 8
"""What an arm takes beside its cache, at most: weights, activations, workspaces, CUDA's own."""


def is_mla(model: str) -> bool:
    """Say whether a model's attention is multi-head latent attention."""
    return "kv_lora_rank" in MODELS[model]


Asked = tuple[str | None, dict[str, str]]
"""The backend that an arm asks vLLM for, None for none, and its environment."""


def attn_select_arms(model: str, options: argparse.Namespace, folder: Path) -> dict[str, Asked]:
    """Return attn-select's arms by name; those of pairs ask for their backend."""
    found = {"VLLM_PLUGINS": "attn_select"}
    if options.workload:
        return {"attn-select": (None, found | {"ATTN_SELECT_WORKLOAD": options.workload})}
    if options.rules:
        return {"attn-select": (None, found | {"ATTN_SELECT_RULES": str(options.rules)})}
    arms: dict[str, Asked] = {}
    for backend in options.prefer.split(","):
        variables, asked = dict(found), OWN_PREFIX + backend if backend in PAIRS else None
        if backend and asked is None:
            rules = folder / f"{backend}.toml"
            phase = 'phase = "decode"\n' if is_mla(model) else ""
            rules.write_text(f'version = 1\n[[rules]]\nname = "bench"\n{phase}prefer = ["{backend}"]\n')
            variables["ATTN_SELECT_RULES"] = str(rules)
        arms[f"attn-select {backend}".rstrip()] = asked, variables
    return arms


def arms_of(model: str, options: argparse.Namespace) -> list[Arm]:
    """Start the processes of a model's arms: vLLM's choice, another backend of vLLM, attn-select."""
    wanted: dict[str, Asked] = {"vLLM": (None, {"VLLM_PLUGINS": ""})}
    if other := other_of(model, options):
        wanted[f"vLLM {other}"] = (other, {"VLLM_PLUGINS": ""})
    wanted |= attn_select_arms(model, options, Path(tempfile.mkdtemp()))
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
    named = [name for name in options.other or ("TRITON_MLA", "TRITON_ATTN") if ("MLA" in name) == is_mla(model)]
    return named[0] if named else None


def batches_of(model: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return requests and context of each batch that a model decodes."""
    found = []
    for batch in (options.batches or BATCHES[model]).split(","):
        if not (read := re.fullmatch(r"(\d+)x(\d+)", batch)):
            raise SystemExit(f"--batches: {batch!r} is not REQUESTSxTOKENS, such as 64x6000")
        found.append((int(read[1]), int(read[2])))
    return found


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
    report_shares(shares)


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
        help="attn-select's backends to prefer, or pairs of them, an arm each; empty: its own rules (default)",
    )
    parser.add_argument("--workload", help="let attn-select decide for this workload")
    parser.add_argument(
        "--other",
        nargs="*",
        metavar="NAME",
        help="one more arm: this backend of vLLM, for the models that it serves (none named: a Triton one for all)",
    )
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
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
