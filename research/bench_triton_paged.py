"""Time the classic paged attention against TRITON_ATTN's decode, its prefill and FA3 on the same keys and values.

Run ``python research/bench_triton_paged.py [--cases REGEX] [--sweep] [--rounds N]``. As
``bench_triton.py``: interleaved, medians, L2 overwritten before each run, outputs checked before they are timed.
"""

from __future__ import annotations

import argparse
import itertools
import re
from typing import Any

import torch
import triton
from bench_triton import Case, Problem, Run, fa3, own_decode

from attn_select import AttentionConfig, select
from attn_select.runtime import Attention, BlockTable, Capacity, attention_group, prepare_batch
from attn_select.runtime.timer import flushed_times, host_times
from attn_select_triton.facts.paged_attention import DECODE
from attn_select_triton.kernels.cache import GATHER_ALIGN
from attn_select_triton.kernels.launch import Launch, Terms, power_of_two
from attn_select_triton.kernels.paged_attention import (
    MOST_ROWS,
    Partials,
    classic_prefill_launch,
    gather_classic,
    paged_attention_v1,
    paged_attention_v2,
)
from attn_select_triton.kernels.prefill import prefill_attention

CASES = [
    Case("B64 S4096 p16", 64, 4096),
    Case("B8 S16384 p16", 8, 16384),
    Case("B256 S1024 p16", 256, 1024),
    Case("B1 S131072 p16", 1, 131072),
    Case("B64 S4096 p8", 64, 4096, page=8),
    Case("B64 S4096 p32", 64, 4096, page=32),
    Case("g1 B64 S4096 p16", 64, 4096, heads=8),
    Case("g7 B64 S4096 p16", 64, 4096, heads=28, kv_heads=4),
    Case("d64 B64 S4096 p16", 64, 4096, size=64),
    Case("d256 B64 S4096 p16", 64, 4096, size=256),
    Case("fp8 B64 S4096 p16", 64, 4096, fp8=True),
    Case("fp8 B8 S16384 p16", 8, 16384, fp8=True),
    Case("prefill B4 S4096 p16", 4, 4096, 4096),
    Case("extend 512 of 16896 p16", 1, 16896, 512),
    Case("extend 64 of 16448 p16", 1, 16448, 64),
    Case("extend 32 of 2080 x16 p16", 16, 2080, 32),
    Case("extend 128 of 2176 x16 p16", 16, 2176, 128),
]
LONGEST = 131072
"""A model's length, which the grid of a captured version 2 covers."""


class Classic:
    """The classic cache with a problem's keys and values."""

    def __init__(self, problem: Problem) -> None:
        self.problem, case = problem, problem.case
        x = 16 // problem.cache.element_size()
        key = problem.key.unflatten(-1, (-1, x))
        self.key = key.permute(0, 2, 3, 1, 4).contiguous()
        self.value = problem.value.permute(0, 2, 3, 1).contiguous()
        self.named: dict[str, Any] = {
            "query_start_loc": problem.starts, "seq_lens": problem.seq_lens, "block_table": problem.table,
            "scale": problem.scale,
        }  # fmt: skip
        self.rows = case.batch * case.heads

    def run(self, version: str, launch: Launch | None = None, longest: int = 0) -> tuple[Run, torch.Tensor]:
        """Return what runs a version, by default with the table's launch and a grid for the case's own length."""
        problem, named = self.problem, {**self.named, "launch": launch}
        output = torch.full_like(problem.query, torch.nan)
        if version == "v2":
            longest = longest or problem.case.seq_len
            count = self.rows * -(-longest // DECODE.partition_size)
            named["partials"] = Partials.reserve(count, problem.case.size, output.dtype, output.device)
            named |= {"max_seq_len": longest, "partition_size": DECODE.partition_size}
        function = paged_attention_v1 if version == "v1" else paged_attention_v2
        return lambda: function(problem.query, self.key, self.value, output, **named), output

    def prefill(self, read: str, launch: Launch | None = None) -> tuple[Run, torch.Tensor]:
        """Return what runs the prefill, over the step's own keys, over the cache, or over copies; the copy counts."""
        problem, case, named = self.problem, self.problem.case, {**self.named, "launch": launch}
        named |= {"max_seq_len": case.seq_len, "terms": Terms()}
        output = torch.full_like(problem.query, torch.nan)
        key, value = self.key, self.value.permute(0, 3, 1, 2)
        gather: dict[str, Any] = {}
        if read == "own":
            order = problem.table.flatten().long()
            key, value = (half[order].flatten(0, 1) for half in (problem.key, problem.value))
            named |= {"block_table": None, "key_start_loc": problem.starts[:-1]}
        elif read == "copy":
            span = -(-case.seq_len // GATHER_ALIGN) * GATHER_ALIGN
            starts = torch.arange(case.batch, device="cuda", dtype=torch.int32) * span
            key, value = torch.empty(
                2, case.batch * span, case.kv_heads, case.size, device="cuda", dtype=torch.bfloat16
            )
            gather = {"key_out": key, "value_out": value, "block_table": problem.table, "key_start_loc": starts}
            gather |= {"seq_lens": problem.seq_lens, "max_keys": case.seq_len}
            named |= {"block_table": None, "key_start_loc": starts, "clean": True}

        def run() -> None:
            if gather:
                gather_classic(self.key, self.value, **gather)
            prefill_attention(problem.query, key, value, output, **named)

        return run, output


def built(case: Case, sweep: bool) -> tuple[Problem, dict[str, tuple[Run, torch.Tensor]]]:
    """Return what to time."""
    problem = Problem(case)
    classic, runs = Classic(problem), {}
    if (peer := fa3(problem)) is not None:
        runs["FA3"] = peer
    if not case.is_decode:
        dtypes = problem.query.dtype, problem.cache.dtype
        launch = classic_prefill_launch(torch.cuda.get_device_capability(), case.size, *dtypes)
        runs["cache"], runs["copy"] = classic.prefill("cache", launch), classic.prefill("copy")
        if case.query_len == case.seq_len:
            runs["own keys"] = classic.prefill("own")
        if sweep:
            for m, n, warps, stages in itertools.product((64, 128), (16, 32, 64), (4, 8), (2, 3)):
                name = f"cache {m}x{n} w{warps} s{stages}"
                runs[name] = classic.prefill("cache", Launch(m, n, warps, stages))
        return problem, runs
    runs["TRITON_ATTN"] = own_decode(problem)
    chosen = DECODE.version(case.batch, case.heads, case.seq_len)
    for version in ("v1", "v2"):
        runs[f"{version}{' (the rule)' if version == chosen else ''}"] = classic.run(version)
    runs[f"v2 for {LONGEST}"] = classic.run("v2", longest=LONGEST)
    if sweep:
        m = min(MOST_ROWS, power_of_two(case.heads // case.kv_heads))
        for n, warps, stages in itertools.product((32, 64, 128), (1, 2, 4), (2, 3, 4)):
            if n // warps in (16, 32, 64) and n * case.size <= 128 * 128:
                runs[f"{chosen} n{n} w{warps} s{stages}"] = classic.run(chosen, Launch(m, n, warps, stages))
    return problem, runs


def host_time(rounds: int) -> None:
    """Print the host time of a layer's forward, and of the bare launch of the same kernel."""
    config = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)
    group = attention_group(select(config, backend="PAGED_ATTENTION"), "cuda", Capacity(16, 64, 1024))
    table = BlockTable(8, 64, group.block_size, group.device)
    for row in range(8):
        table.set_row(row, list(range(8 * row, 8 * row + 8)))
    cache, layer = group.allocate_kv_cache(64), Attention(group, caller_writes=True)
    query = torch.randn(8, 32, 128, device="cuda", dtype=torch.bfloat16)
    metadata, output = group.build(prepare_batch([1] * 8, [100] * 8, table)), torch.empty_like(query)
    part, impl = metadata.parts[0].metadata, layer.impls["decode"]
    key, value = impl._views(cache)  # type: ignore[attr-defined]
    timed: dict[str, Run] = {
        "layer": lambda: layer.forward(query, None, None, cache, metadata, output),
        "bare launch": lambda: paged_attention_v1(query, key, value, output, scale=layer.terms.scale, **part.decode),
        "build": lambda: group.build(metadata.common),
    }
    with torch.no_grad():
        for name, median in host_times(timed, 20, rounds).items():
            print(f"   host, {name}: {median:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="")
    parser.add_argument("--sweep", action="store_true", help="time other launches too")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    if re.search(arguments.cases, "host"):
        host_time(arguments.rounds)
    for case in CASES:
        if not re.search(arguments.cases, case.name):
            continue
        problem, runs = built(case, arguments.sweep)
        errors = {}
        for name, (run, output) in list(runs.items()):
            try:
                run()
                torch.cuda.synchronize()
                errors[name] = problem.error(output)
            except Exception as error:
                print(f"   {name}: {type(error).__name__} {str(error)[:90]}")
                del runs[name]
        times = flushed_times({name: run for name, (run, _) in runs.items()}, arguments.rounds)
        print(f"{case.name}:")
        for name, taken in sorted(times.items(), key=lambda item: item[1]):
            share = times.get("FA3", float("nan")) / taken
            print(f"   {name:16s} {taken:8.1f} us  share of FA3 {share:.3f}  error {errors[name]:.1e}", flush=True)
        del problem, runs


if __name__ == "__main__":
    main()
