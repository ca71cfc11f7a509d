"""Measures selection and prints a table. Run by ``make bench-select``; nothing here is asserted.

All times are the least of several, or the tenth percentile of many: what else runs on the machine only adds.

Cold start is timed from outside, as whole processes, alternating ``attn-select explain`` with a process that only
imports what the command line cannot do without (click, pluggy, importlib.metadata, tomllib, pydantic with one model of
30 fields).
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from attn_select import AttentionConfig, clear_cache, select
from attn_select.decide.decide import decide
from attn_select.decide.explicit import Choice
from attn_select.decide.selector import situation_for
from attn_select.layer.models import presets
from attn_select.machine.device import known_gpus
from attn_select.machine.environment import installed_version
from attn_select.times.evidence import load_evidence
from attn_select.times.workload import parse_workload

BARE = """
import click, pluggy, importlib.metadata, tomllib
from pydantic import BaseModel, create_model
create_model("Model", **{f"field_{i}": (int, i) for i in range(30)})()
"""
EXPLAIN = ["-c", "from attn_select_cli.main import main; main()", "explain", "--model", "deepseek-v3", "--gpu", "h100"]
WORKLOAD = "chat"


def process(arguments: Sequence[str]) -> tuple[float, float]:
    """Run Python with ``arguments``; return wall milliseconds and peak resident MiB."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall = (time.perf_counter() - start) * 1e3
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {child.returncode}")
    return wall, usage.ru_maxrss / 1024


def cold_start(runs: int) -> list[tuple[str, str, str]]:
    """Alternate the bare imports, explain, and explain with a workload; return table rows."""
    kinds = ["-c", BARE], EXPLAIN, [*EXPLAIN, "--workload", WORKLOAD]
    for kind in kinds:
        process(kind)
    runs_of = [*zip(*([process(kind) for kind in kinds] for _ in range(runs)), strict=True)]
    least = [(min(wall for wall, _ in each), min(peak for _, peak in each)) for each in runs_of]
    shown = [f"{wall:.0f} ms, {peak:.0f} MiB" for wall, peak in least]
    more = [f"{wall - least[0][0]:.0f} ms" for wall, _ in least]
    return [
        ("bare imports, process", shown[0], ""),
        ("attn-select explain, process", shown[1], "45 MB"),
        ("  more than the bare imports", more[1], "60 ms"),
        (f"attn-select explain --workload {WORKLOAD}, process", shown[2], ""),
        ("  more than the bare imports", more[2], "100 ms"),
    ]


def distinct_configs(count: int) -> list[AttentionConfig]:
    """Return ``count`` different configs, a third of them MLA, seeded."""
    rng = random.Random(0)
    configs: dict[AttentionConfig, None] = {}
    while len(configs) < count:
        common = {
            "dtype": rng.choice(["bfloat16", "float16"]),
            "kv_cache_dtype": rng.choice(["auto", "fp8_e4m3", "fp8_e5m2"]),
            "block_size": rng.choice([None, 16, 32, 64, 128]),
            "batch_invariant": rng.random() < 0.1,
            "num_speculative_tokens": rng.randrange(8),
        }
        if rng.random() < 1 / 3:
            dims = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
            sparse = {"sparse_top_k": 2048} if rng.random() < 0.3 else {}
            config = AttentionConfig(num_heads=rng.choice([8, 16, 32, 64, 128]), **dims, **sparse, **common)
        else:
            kv_heads = rng.choice([1, 2, 4, 8])
            config = AttentionConfig(
                num_heads=kv_heads * rng.choice([1, 4, 7, 8]),
                num_kv_heads=kv_heads,
                head_size=rng.choice([64, 80, 96, 128, 192, 256]),
                sliding_window=rng.choice([None, 128, 4096]),
                sinks=rng.random() < 0.1,
                logits_soft_cap=rng.choice([None, None, 50.0]),
                **common,
            )
        configs[config] = None
    return list(configs)


def in_process(repeats: int) -> list[tuple[str, str, str]]:
    """Time cached and uncached selections; return table rows."""
    config = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
    select(config, "h100")
    cached = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(100_000):
            select(config, "h100")
        cached.append((time.perf_counter() - start) * 1e4)
    rows = [("cached select(), same config object", f"{min(cached):.0f} ns", "1000 ns")]
    count = 1000
    configs = distinct_configs(count * (repeats + 1))  # the first thousand warms up, and none is ever asked again
    choice, batches = Choice(), parse_workload(WORKLOAD)
    for gpu in ("h100", "b200", "rtx5090"):
        situation = situation_for(gpu, None, None)
        uncached = timed(configs, count, lambda config, situation=situation: decide(situation, config, choice))
        rows.append((f"uncached, {count} distinct configs, {gpu}", f"{uncached:.0f} us", "1000 us"))
    situation = situation_for("h100", None, None)
    evidence = load_evidence(situation.device, situation.environment, situation.specs)
    uncached = timed(configs, count, lambda config: decide(situation, config, choice, None, batches, evidence))
    rows.append((f"the same for workload {WORKLOAD}, h100", f"{uncached:.0f} us", ""))
    clear_cache()
    return rows


def timed(configs: list[AttentionConfig], count: int, decide: Callable[[AttentionConfig], object]) -> float:
    """Return the tenth percentile of the microseconds per config in parts of 50, after ``count`` to warm up."""
    for config in configs[:count]:
        decide(config)
    found = []
    for first in range(count, len(configs), 50):
        part = configs[first : first + 50]
        start = time.perf_counter()
        for config in part:
            decide(config)
        found.append((time.perf_counter() - start) * 1e6 / len(part))
    return statistics.quantiles(found, n=10)[0]


def matrix() -> tuple[str, str, str]:
    """Time a matrix of 15 models by 20 GPUs as a process; return a table row."""
    models, gpus = list(presets())[:15], list(known_gpus())[:20]
    arguments = ["-c", "from attn_select_cli.main import run; import sys; sys.exit(run(sys.argv[1:]) > 1)", "matrix"]
    arguments += [word for name in models for word in ("--model", name)] + [
        word for name in gpus for word in ("--gpu", name)
    ]
    wall = min(process(arguments)[0] for _ in range(5))
    return f"matrix, {len(models)} models by {len(gpus)} GPUs, process", f"{wall:.0f} ms", "1000 ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="processes of each kind for the cold start (default 15)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of the in-process loops (default 5)")
    options = parser.parse_args()
    rows = [*cold_start(options.runs), *in_process(options.repeats), matrix()]
    plugins = situation_for("h100", None, None).registry.plugins
    print(
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs, "
        f"torch {installed_version('torch')},"
    )
    print(f"{len(plugins)} plugins with {sum(len(p.backends) for p in plugins)} backends\n")
    width, value_width = (max(len(row[i]) for row in rows) for i in (0, 1))
    print(f"{'what':<{width}}  {'measured':<{value_width}}  goal")
    for name, value, goal in rows:
        print(f"{name:<{width}}  {value:<{value_width}}  {goal}".rstrip())


if __name__ == "__main__":
    main()
