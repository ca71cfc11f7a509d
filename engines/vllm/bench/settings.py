"""Production settings of the real vLLM engine, each served by vLLM's choice, by attn-select's, and by a third backend.

    python settings.py                                             # all settings, 8 engines at a time on one GPU
    python settings.py --also ATTN_SELECT_TRITON_ATTN,TRITON_ATTN --rows fp8-cache,lora
    python settings.py --model tiny --also "" --rows drafts-eagle --longest 200 --requests 6 --jobs 2  # on a CPU

The arms of a setting are vLLM's choice, attn-select's, and the backends of ``--also``: two of vLLM's own say how near
such backends are to each other, and attn-select's run by name, since its choice may be vLLM's own. Every arm serves
the same drawn requests twice: the first time warms up. An arm that fails or says nothing for ``--limit`` seconds is
told with the last lines of its output, and the others go on.

Engines run side by side. One at a time is measured, but others start meanwhile: the rates are no figures to compare
closely, for which ``serve.py`` is there. Printed are, as each setting ends and as a table at the end, whether an arm
ran, its layers by backend, tokens per second, the share of greedy tokens before the first difference from vLLM's
choice, prompt tokens taken from a cache, drafts accepted, and seconds to start.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_arms import BASE, Arm, ArmError, arm_names
from serve_engine import MODELS, RANK
from serve_requests import agreement

SHARED = 1024
"""Tokens with which all prompts begin, where they begin alike."""
SIZES = (1, 2, 4, 8, 16, 32)
"""Requests of captured decodes; as many run at a time."""
ALSO = "TRITON_ATTN,TRITON_MLA"
"""Two of vLLM's own backends: how near they are to its choice is the yardstick of tokens."""
MEASURED = threading.Lock()
"""Held while an engine is measured."""
STEPS = {"max_num_batched_tokens": 512}
"""Steps so small that prompts come in chunks, and that graphs hold whole mixed ones."""
PIECES = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": (*SIZES, 64, 128, 256, 512)}
NO_CACHE = {"variables": {"VLLM_DISABLE_COMPILE_CACHE": "1"}}
COUNTED = {"disable_log_stats": False}
PER_HEAD = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "attn_head"}


@dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        options: of vLLM's ``LLM``.
        job: what else ``serve_engine.Engine`` takes.
        model: of ``serve_engine.MODELS``, where it is not the one asked for.
        layers: of the model.
        gpus: how many it takes.
        two_sides: whether one engine computes the prompts, and another takes them from it through a connector.
    """

    options: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    layers: int = 4
    gpus: int = 1
    two_sides: bool = False


ROWS = {  # what takes longest comes first
    "graphs-piecewise": Row(STEPS | {"compilation_config": PIECES | {"mode": 3, "backend": "eager"}}, NO_CACHE),
    "compiled": Row({"compilation_config": {}}, NO_CACHE),  # vLLM's defaults
    # The connector stores a prompt when its first chunk is computed, and knows prompts by their whole blocks.
    "kv-connector": Row(
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 16384, "block_size": 32}, two_sides=True
    ),
    "prefix-caching": Row(job={"shared": SHARED}),
    "chunked-prefill": Row(STEPS),
    "fp8-cache": Row({"kv_cache_dtype": "fp8"}),
    "fp8-cache-scales-per-head": Row(
        job={"config": {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": PER_HEAD}}}
    ),
    "lora": Row({"enable_lora": True, "max_lora_rank": RANK}, {"lora": True}),
    "graphs-full-and-piecewise": Row(  # not compiled
        STEPS | {"compilation_config": PIECES | {"mode": 0, "cudagraph_mode": "FULL_AND_PIECEWISE"}},
        {"variables": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}},
    ),
    # vLLM asserts that less memory is in use afterwards, whatever other engines take meanwhile: so a larger cache.
    "sleep": Row({"enable_sleep_mode": True}, {"sleep": True, "cache_gib": 8}),
    "drafts-ngram": Row(COUNTED, {"speculate": "ngram:3"}),
    "drafts-eagle": Row(COUNTED, {"speculate": "eagle:3"}, layers=1),  # one layer, which the head knows
    "mla": Row(STEPS, {"shared": SHARED, "config": {"first_k_dense_replace": 4}}, model="mla"),
    # vLLM wants more ranks than KV heads, and leave to ask its workers what they run.
    "dcp": Row(
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"variables": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}},
        model="rank",
        gpus=2,
    ),
}


def run(name: str, arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start an arm of a row, serve twice, and return what the second service was, with ``layers`` and ``took``.

    Raises:
        ArmError: it failed, or took too long.
    """
    row = ROWS[name]
    job = {
        "model": row.model or options.model,
        "longest": options.longest,
        "sizes": SIZES,
        "cache_gib": options.cache_gib,
        **row.job,
        "config": {"num_hidden_layers": row.layers} | row.job.get("config", {}),
        "options": {"gpu_memory_utilization": 0.05} | row.options,
    }
    engines = []
    with tempfile.TemporaryDirectory() as store:
        extra = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": store}}
        try:
            for role in ("kv_producer", "kv_consumer") if row.two_sides else ("",):
                if role:
                    job["options"] |= {"kv_transfer_config": extra | {"kv_role": role}}
                log = options.logs / "-".join(filter(None, ("settings", name, arm, role)))
                engines.append(Arm(arm, job, log.with_suffix(".log")))
            started = [engine.start(options.limit) for engine in engines]
            for seed in (options.seed, options.seed + 1):
                asked = ("mixed", seed, options.requests, options.longest)
                for engine in engines[:-1]:
                    engine.ask("serve", *asked, 1, limit=options.limit)
                if seed == options.seed:  # warms up
                    engines[-1].ask("serve", *asked, limit=options.limit)
                    continue
                with MEASURED:
                    found = engines[-1].ask("serve", *asked, limit=options.limit)
        finally:
            for engine in engines:
                engine.end()
    return found | started[-1]


def said(name: str, arms: dict[str, Future[dict[str, Any]]]) -> str:
    """Return a line of each arm of a row, all ended, and of those that failed the end of their output."""
    lines, base = [name if arms else f"{name}: skipped, takes {ROWS[name].gpus} GPUs (--gpus)"], None
    for arm, future in arms.items():
        line = f"  {arm:<26} "
        try:
            found = future.result()
        except ArmError as error:
            first, *last = [text for text in str(error).splitlines() if text.strip()]
            errors = [place for place, text in enumerate(last) if re.search(r"\w(Error|Exception)\b", text)]
            told = last[errors[-1] :][:3] if errors else last[-3:]  # warnings may come behind the last error
            lines += [f"{line}FAILED: {first}", *(f"    | {text[:300]}" for text in told)]
            continue
        rate = sum(map(len, found["tokens"])) / found["seconds"]
        line += f"ran, {found['layers']}, {rate:.0f} tokens/s"
        if arm == BASE:
            base = found["tokens"], rate
        elif base is not None:
            line += f", ratio {rate / base[1]:.2f}, tokens agree to {agreement(base[0], found['tokens']):.0%}"
        if found["cached"]:
            line += f", {found['cached']} prompt tokens cached"
        if found["drafts"]:
            line += ", {1:.0f} of {0:.0f} drafts accepted".format(*found["drafts"])
        lines.append(f"{line}, {found['took']:.0f} s to start")
    return "\n".join(lines)


def arms_of(name: str, options: argparse.Namespace) -> Sequence[str]:
    """Return the arms of a row, none without the GPUs for it."""
    if ROWS[name].gpus > options.gpus:
        return []
    return arm_names(ROWS[name].model or options.model, options.also)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"default: {','.join(ROWS)}")
    parser.add_argument("--model", default="llama", choices=sorted(MODELS), help="of most rows (default: llama)")
    parser.add_argument(
        "--also", default=ALSO, metavar="NAME,…", help=f"backends by vLLM's names, an arm each (default: {ALSO})"
    )
    parser.add_argument("--requests", type=int, default=32, help="of a service (default: 32)")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of a request at most (default: 3000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first service's requests (default: 0)")
    parser.add_argument("--cache-gib", type=int, default=3, help="of an arm's KV cache (default: 3)")
    parser.add_argument("--jobs", type=int, default=8, help="arms at a time (default: 8)")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a start or a service (default: 150)")
    parser.add_argument("--gpus", type=int, default=1, help="that there are (default: 1)")
    parser.add_argument("--logs", type=Path, default=Path(os.environ.get("OUT", tempfile.gettempdir())))
    options = parser.parse_args()
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows: {unknown[0]!r} is unknown; known are {', '.join(ROWS)}")
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = {name: {arm: pool.submit(run, name, arm, options) for arm in arms_of(name, options)} for name in names}
        rows_of = {future: name for name, arms in rows.items() for future in arms.values()}
        table = {name: said(name, arms) for name, arms in rows.items() if not arms}
        for future in as_completed(rows_of):
            name = rows_of[future]
            if name not in table and all(each.done() for each in rows[name].values()):
                table[name] = said(name, rows[name])
                print(table[name], flush=True)
    print(f"\nAll rows, {options.requests} requests each, in {time.monotonic() - began:.0f} s:")
    print("\n".join(table[name] for name in names))


if __name__ == "__main__":
    main()
