"""Time TRITON_ATTN as a layer runs it: beside the bare kernels and FA3, path against path, and on the host.

Run ``python research/bench_triton_layer.py [--what KINDS] [--rounds N]``; KINDS are
layers,uneven,streams,cascade,host, or some of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from bench_triton import CASES, Case, Problem, fa3, own_decode, own_prefill

from attn_select import AttentionConfig, select
from attn_select.runtime import Attention, AttentionGroup, Capacity, CommonAttentionMetadata, Outputs, attention_group
from attn_select.runtime.cuda_graph import StaticBatch
from attn_select.runtime.timer import flushed_times, host_times
from attn_select_triton.runtime import schedule


class Step:
    """A case's group, layer and batch; ``lens`` are other lengths than the case's."""

    def __init__(self, problem: Problem, lens: list[int] | None = None, cuda_graphs: bool = False) -> None:
        case = problem.case
        config = AttentionConfig(
            num_heads=case.heads, num_kv_heads=case.kv_heads, head_size=case.size, block_size=case.page,
            kv_cache_dtype="fp8_e4m3" if case.fp8 else "auto", sliding_window=case.window or None,
            num_speculative_tokens=case.query_len - 1 if case.is_decode else 0,
        )  # fmt: skip
        capacity = Capacity(max(case.batch, 8), len(problem.query), max(case.seq_len, 131072))
        selection = select(config, backend="TRITON_ATTN")
        self.group: AttentionGroup = attention_group(selection, capacity=capacity, cuda_graphs=cuda_graphs)
        self.layer = Attention(self.group, caller_writes=True)
        self.problem, self.kv_cache = problem, problem.cache.transpose(0, 1)
        self.output = torch.full_like(problem.query, float("nan"))
        bounds = torch.arange(case.batch + 1, dtype=torch.int32) * case.query_len
        seq_lens = torch.tensor(lens or [case.seq_len] * case.batch, dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=bounds.cuda(),
            query_start_loc_cpu=bounds,
            seq_lens=seq_lens.cuda(),
            seq_lens_cpu=seq_lens,
            num_reqs=case.batch,
            num_actual_tokens=len(problem.query),
            max_query_len=case.query_len,
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=problem.table,
            slot_mapping=torch.full((len(problem.query),), -1, device="cuda"),
        )

    def run(self, metadata: Any = None) -> Callable[[], Any]:
        metadata = metadata or self.group.build(self.common)
        return lambda: self.layer(self.problem.query, None, None, self.kv_cache, metadata, self.output)

    def captured(self) -> Callable[[], Any]:
        static = StaticBatch(self.group, self.problem.case.query_len)
        metadata = self.group.build_for_cudagraph_capture(static.dummy(self.common.num_reqs))
        self.group.build(static.load(self.common, self.common.num_reqs))
        run = self.run(metadata)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return lambda: (graph.replay(), run, static)  # the graph reads what these own


class Mixed(Step):
    """Decodes of one length, and a prompt that is a request of its own."""

    def __init__(self, decodes: int, seq_len: int, tokens: int) -> None:
        rows = -(-tokens // seq_len)
        problem = Problem(Case("", decodes + rows, seq_len))
        problem.query = torch.randn(decodes + tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
        super().__init__(problem)
        table = torch.zeros(decodes + 1, rows * problem.table.shape[1], dtype=torch.int32, device="cuda")
        table[:decodes, : problem.table.shape[1]] = problem.table[:decodes]
        table[decodes] = problem.table[decodes:].flatten()
        bounds = torch.tensor([*range(decodes + 1), decodes + tokens], dtype=torch.int32)
        seq_lens = torch.tensor([*[seq_len] * decodes, tokens], dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=bounds.cuda(),
            query_start_loc_cpu=bounds,
            seq_lens=seq_lens.cuda(),
            seq_lens_cpu=seq_lens,
            num_reqs=decodes + 1,
            num_actual_tokens=decodes + tokens,
            max_query_len=tokens,
            max_seq_len=max(seq_len, tokens),
            block_table_tensor=table,
            slot_mapping=torch.full((decodes + tokens,), -1, device="cuda"),
        )

    def replay(self, beside: bool) -> Callable[[], Any]:
        """Return a graph of the step, its decodes beside the prompt or before it."""
        with constants(worth_two_streams=lambda *_: beside):
            run = self.run()
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return lambda: (graph.replay(), run)


@contextmanager
def constants(**values: Any) -> Iterator[None]:
    """Set constants of the schedule for a while."""
    before = {name: getattr(schedule, name) for name in values}
    for name, value in values.items():
        setattr(schedule, name, value)
    yield
    for name, value in before.items():
        setattr(schedule, name, value)


def show(title: str, runs: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Print each run's median, in microseconds."""
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    times = flushed_times(runs, rounds)
    print(f"{title:34s} " + "  ".join(f"{name} {time_:.1f}" for name, time_ in times.items()), flush=True)


def layers(rounds: int) -> None:
    for case in CASES:
        problem = Problem(case)
        made = fa3(problem)
        step = Step(problem)
        runs = {} if made is None else {"FA3": made[0]}
        runs |= {"kernels": (own_decode(problem) if case.is_decode else own_prefill(problem))[0], "layer": step.run()}
        if case.is_decode:
            runs["graph"] = Step(problem, cuda_graphs=True).captured()
        runs["layer"]()
        error = problem.error(step.output)
        show(f"{case.name} ({error:.0e})", runs, rounds)


def uneven(rounds: int) -> None:
    torch.manual_seed(0)
    batches = {
        "63 x 1024, 1 x 65536": [1024] * 63 + [65536],
        "1024 to 16384, B16": torch.linspace(1024, 16384, 16).int().tolist(),
        "128 to 8192, B64": torch.linspace(128, 8192, 64).int()[torch.randperm(64)].tolist(),
        "equal 4096, B64": [4096] * 64,
    }
    for name, lens in batches.items():
        problem = Problem(Case("", len(lens), max(lens) if len(lens) < 64 else 8192))
        if max(lens) > 8192 and len(lens) == 64:  # one long request: its table repeats blocks
            problem.table = problem.table.repeat(1, 8)
        runs = {"layer": Step(problem, lens).run(), "graph": Step(problem, lens, cuda_graphs=True).captured()}
        show(name, runs, rounds)


def streams(rounds: int) -> None:
    """Print the time of mixed steps with decodes before and beside a prompt."""
    for decodes, seq_len in ((8, 512), (8, 1024), (16, 1024), (32, 1024), (8, 8192), (50, 2048), (64, 4096)):
        for tokens in (64, 128, 256, 512, 1024, 2048, 4096):
            step = Mixed(decodes, seq_len, tokens)
            runs = {"one stream": step.replay(False), "two": step.replay(True)}
            show(f"{decodes} x {seq_len} ({decodes * seq_len >> 8} MiB), {tokens}", runs, rounds)


def cascade(rounds: int) -> None:
    for batch, prefix in ((8, 4096), (8, 8192), (16, 2048), (16, 4096), (64, 512), (64, 1024), (64, 2048), (128, 1024)):
        problem = Problem(Case("", batch, prefix + 512))
        problem.table[:, : prefix // 16] = problem.table[:1, : prefix // 16]
        step = Step(problem)
        step.group.distinct[0].builder.least_cascade_bytes = 0
        saved = (batch - 1) * prefix * 4096 / 2**20
        plain, apart = step.group.build(step.common), step.group.build(step.common, common_prefix_len=prefix)
        show(f"B{batch} prefix {prefix}: {saved:.0f} MiB", {"plain": step.run(plain), "apart": step.run(apart)}, rounds)


def host(rounds: int) -> None:
    """Print host microseconds per call: of the build, of the layer, of its impl alone, of the kernels prepared."""
    unequal = torch.linspace(1024, 8192, 16).int().tolist(), torch.linspace(128, 8192, 64).int().tolist()
    for case, *lens in (
        (Case("decode, 1 split", 256, 32),),
        (Case("decode, splits", 1, 4096),),
        (Case("16 decodes, splits", 16, 8192),),
        (Case("16 decodes of 1024 to 8192", 16, 8192), unequal[0]),
        (Case("64 decodes of 128 to 8192", 64, 8192), unequal[1]),
        (Case("prefill p64", 1, 64, 64, 64),),
        (Case("prefill, warp-specialised", 1, 2048, 1024),),
        (Case("the same, keys shared", 1, 2048, 256),),
        (Case("prefill, gathered", 1, 512, 512),),
        (Case("prefill, FP8 cache", 1, 512, 512, fp8=True),),
    ):
        found = host_times(_host_calls(Step(Problem(case), *lens)), rounds=rounds)
        print(f"{case.name:34s} " + "  ".join(f"{name} {time_:.1f}" for name, time_ in found.items()), flush=True)
    calls = {}
    for beside in (False, True):
        with constants(worth_two_streams=lambda *_, beside=beside: beside):
            calls["two streams" if beside else "one stream"] = Mixed(16, 1024, 512).run()
    found = host_times(calls, rounds=rounds)
    print("16 decodes and a prompt, layer      " + "  ".join(f"{name} {time_:.1f}" for name, time_ in found.items()))


def _host_calls(step: Step) -> dict[str, Callable[[], Any]]:
    metadata, query, output = step.group.build(step.common), step.problem.query, step.output
    own = metadata.parts[0].metadata
    impl = next(iter(step.layer.impls.values()))
    key, value = step.problem.cache.unbind(1)
    terms, decode = impl._terms[True], own.parts[0].decode
    calls: dict[str, Callable[[], Any]] = {
        "build": lambda: step.group.build(step.common),
        "layer": step.run(metadata),
        "impl": lambda: impl.forward(query, None, None, step.kv_cache, own, Outputs(output)),
    }
    if decode is not None:
        calls["kernels"] = lambda: decode(query, key, value, output, scale=0.1, terms=terms)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default="layers,uneven,streams,cascade,host")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    known = {
        "layers": layers, "uneven": uneven, "streams": streams, "cascade": cascade, "host": host,
    }  # fmt: skip
    for name in arguments.what.split(","):
        print(f"--- {name}, microseconds")
        known[name](arguments.rounds)


if __name__ == "__main__":
    main()
