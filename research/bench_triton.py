"""Time the Triton kernels against the vendors' on one GPU, interleaved, medians, L2 flushed, checked before timed.

Run ``python research/bench_triton.py [--cases REGEX] [--sweep] [--peers fa3,flashinfer,xqa] [--rounds N]``.
Peers that cannot be imported are left out.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attn_select.runtime.timer import flushed_times
from attn_select_triton.kernels import cache, decode, launch, merge, prefill
from attn_select_triton.kernels.launch import Launch, Terms

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    seq_len: int
    query_len: int = 1
    page: int = 16
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    window: int = 0
    fp8: bool = False

    @property
    def is_decode(self) -> bool:
        return self.query_len <= 8


CASES = [
    Case("decode B64 S4096 p16", 64, 4096),
    Case("decode B8 S16384 p16", 8, 16384),
    Case("decode B256 S1024 p16", 256, 1024),
    Case("decode B1 S131072 p16", 1, 131072),
    Case("decode B64 S4096 p64", 64, 4096, page=64),
    Case("decode B8 S16384 p64", 8, 16384, page=64),
    Case("decode B256 S1024 p64", 256, 1024, page=64),
    Case("decode B1 S131072 p64", 1, 131072, page=64),
    Case("decode q4 B64 S4096 p16", 64, 4096, 4),
    Case("decode g7 B64 S4096 p16", 64, 4096, heads=28, kv_heads=4),
    Case("decode d64 B64 S4096 p16", 64, 4096, size=64),
    Case("decode d256 B64 S4096 p16", 64, 4096, size=256),
    Case("decode win B8 S131072 p16", 8, 131072, window=4096),
    Case("decode g16 B64 S4096 p16", 64, 4096, heads=64, kv_heads=4),
    Case("decode q4 g16 B64 S4096 p16", 64, 4096, 4, heads=64, kv_heads=4),
    Case("decode fp8 B64 S4096 p16", 64, 4096, fp8=True),
    Case("decode fp8 B8 S16384 p16", 8, 16384, fp8=True),
    Case("prefill B4 S4096 p16", 4, 4096, 4096),
    Case("prefill B1 S16384 p64", 1, 16384, 16384, 64),
    Case("prefill B16 S512 p16", 16, 512, 512),
    Case("prefill d64 B4 S4096 p16", 4, 4096, 4096, size=64),
    Case("prefill d256 B4 S4096 p16", 4, 4096, 4096, size=256),
    Case("extend 512 of 16896 p16", 1, 16896, 512),
]


class Problem:
    """The tensors of a case: one cache ``(blocks, 2, page, kv_heads, size)`` that every kernel can read."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        pages = -(-case.seq_len // case.page)
        blocks = case.batch * pages
        shape = (blocks, 2, case.page, case.kv_heads, case.size)
        self.cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        if case.fp8:
            self.cache_bf16, self.cache = self.cache, self.cache.to(torch.float8_e4m3fn)
        self.key, self.value = self.cache.unbind(1)
        self.table = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(case.batch, pages)
        tokens = case.batch * case.query_len
        self.query = torch.randn(tokens, case.heads, case.size, device="cuda", dtype=torch.bfloat16)
        self.starts = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * case.query_len
        self.seq_lens = torch.full((case.batch,), case.seq_len, device="cuda", dtype=torch.int32)
        self.scale = case.size**-0.5
        self.terms = Terms(window=case.window)

    def error(self, output: torch.Tensor) -> float:
        """Return the largest relative error over some requests and rows, against float32."""
        case, worst = self.case, 0.0
        for request in {0, case.batch // 2, case.batch - 1}:
            pages = self.table[request].long()
            key, value = (
                self.cache[pages, i].flatten(0, 1)[: case.seq_len].float().transpose(0, 1) for i in (0, 1)
            )  # (kv_heads, S, size)
            picks = sorted({0, case.query_len // 3, case.query_len - 1})
            for token in picks:
                row = request * case.query_len + token
                position = case.seq_len - case.query_len + token
                low = max(0, position - case.window + 1) if case.window else 0
                query = self.query[row].float().view(case.kv_heads, -1, case.size)
                scores = query @ key[:, low : position + 1].transpose(1, 2) * self.scale
                wanted = (scores.softmax(-1) @ value[:, low : position + 1]).flatten(0, 1)
                got = output[row].float()
                worst = max(worst, float((got - wanted).norm() / wanted.norm()) if got.isfinite().all() else 9e9)
        return worst


def fa3(problem: Problem) -> tuple[Run, torch.Tensor] | None:
    if problem.case.fp8:
        key, value = problem.cache_bf16.unbind(1)
    else:
        key, value = problem.key, problem.value
    try:
        from vllm.vllm_flash_attn import flash_attn_interface as fa
    except ImportError:
        return None
    case, output = problem.case, torch.empty_like(problem.query)
    window = (case.window - 1, 0) if case.window else (-1, -1)

    def run() -> None:
        fa.flash_attn_varlen_func(
            problem.query, key, value, case.query_len, problem.starts, case.seq_len, seqused_k=problem.seq_lens,
            fa_version=3, softmax_scale=problem.scale, causal=True, block_table=problem.table, out=output,
            window_size=list(window),
        )  # fmt: skip

    return run, output


def flashinfer_decode(problem: Problem) -> tuple[Run, torch.Tensor] | None:
    case = problem.case
    if case.query_len > 1 or not case.is_decode:
        return None
    try:
        import flashinfer
    except ImportError:
        return None
    output = torch.empty_like(problem.query)
    workspace = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    last = torch.full((case.batch,), (case.seq_len - 1) % case.page + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        problem.starts * problem.table.shape[1], problem.table.flatten(), last, case.heads, case.kv_heads, case.size,
        case.page, q_data_type=torch.bfloat16, kv_data_type=problem.cache.dtype,
        window_left=case.window - 1 if case.window else -1,
    )  # fmt: skip
    return lambda: wrapper.run(problem.query, problem.cache, out=output), output


def xqa_decode(problem: Problem) -> tuple[Run, torch.Tensor] | None:
    case = problem.case
    if case.query_len > 1:
        return None
    try:
        import flashinfer
    except ImportError:
        return None
    output = torch.empty_like(problem.query)
    workspace = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
    entry = flashinfer.decode.trtllm_batch_decode_with_kv_cache
    return lambda: entry(
        problem.query, problem.cache, workspace, problem.table, problem.seq_lens, case.seq_len,
        bmm1_scale=problem.scale, bmm2_scale=1.0, kv_layout="NHD", backend="xqa", out=output,
        window_left=case.window - 1 if case.window else -1,
    ), output  # fmt: skip


PEERS: dict[str, Callable[[Problem], tuple[Run, torch.Tensor] | None]] = {
    "fa3": fa3,
    "flashinfer": flashinfer_decode,
    "xqa": xqa_decode,
}


def own_prefill(
    problem: Problem, chosen: Launch | None = None, gathered: bool | None = None
) -> tuple[Run, torch.Tensor]:
    """The prefill, by default as the table has it; its gather counts."""
    case, output = problem.case, torch.full_like(problem.query, float("nan"))
    arguments: dict[str, Any] = {"block_table": problem.table}
    if gathered is None:
        gathered = case.page % cache.GATHER_ALIGN != 0 or case.fp8
    if gathered:
        span = -(-case.seq_len // cache.GATHER_ALIGN) * cache.GATHER_ALIGN
        work = torch.empty(2, case.batch * span, case.kv_heads, case.size, device="cuda", dtype=torch.bfloat16)
        starts = torch.arange(case.batch, device="cuda", dtype=torch.int32) * span
        arguments = {"key_start_loc": starts, "clean": True}

    def run() -> None:
        source = (problem.key, problem.value)
        if gathered:
            cache.gather_pages(
                *source, work[0], work[1], block_table=problem.table, query_start_loc=problem.starts,
                key_start_loc=starts, seq_lens=problem.seq_lens, max_keys=span, window=case.window,
            )  # fmt: skip
            source = (work[0], work[1])
        prefill.prefill_attention(
            problem.query, *source, output, query_start_loc=problem.starts, seq_lens=problem.seq_lens,
            max_seq_len=case.seq_len, scale=problem.scale, terms=problem.terms, launch=chosen, **arguments,
        )  # fmt: skip

    return run, output


def own_decode(problem: Problem, chosen: Launch | None = None, splits: int = 0) -> tuple[Run, torch.Tensor]:
    """The decode, by default as the table has it."""
    case, output = problem.case, torch.full_like(problem.query, float("nan"))
    keys = min(case.seq_len, case.window + case.query_len) if case.window else case.seq_len
    gpu = launch.gpu_of(problem.query.device)
    programs, rows = case.batch * case.kv_heads, case.heads // case.kv_heads * case.query_len
    used = chosen or launch.decode_launch(
        gpu.capability, rows, case.size, problem.query.dtype, problem.key.dtype, programs / gpu.sms
    )  # fmt: skip
    splits = splits or launch.num_splits_for(programs, keys, gpu, used, 2 * case.size * problem.key.itemsize)
    size = decode.decode_workspace(len(problem.query), case.heads, case.size, splits)
    workspace = torch.empty(size, device="cuda", dtype=torch.float32)

    def run() -> None:
        decode.decode_attention(
            problem.query, problem.key, problem.value, output, query_start_loc=problem.starts,
            seq_lens=problem.seq_lens, block_table=problem.table, max_query_len=case.query_len, scale=problem.scale,
            terms=problem.terms, num_splits=splits, workspace=workspace, launch=chosen,
        )  # fmt: skip

    return run, output


def prefill_sweep(case: Case) -> dict[str, tuple[Launch, bool]]:
    """Return launches to try, and whether pages are gathered first."""
    tiles = [(64, 32, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8)]
    found: dict[str, tuple[Launch, bool]] = {}
    for (m, n, w), s in itertools.product(tiles, [2, 3, 4, 5]):
        found[f"pages {m}x{n} w{w} s{s}"] = (Launch(m, n, w, s), False)
        found[f"gather {m}x{n} w{w} s{s}"] = (Launch(m, n, w, s), True)
    return found


def decode_sweep(case: Case) -> dict[str, tuple[Launch, int]]:
    """Return launches to try, each with some split counts."""
    m = launch.power_of_two(case.heads // case.kv_heads * case.query_len)
    per_sm = case.batch * case.kv_heads / launch.sm_count(torch.device("cuda"))
    found: dict[str, tuple[Launch, int]] = {}
    for n, w, s, load in itertools.product([32, 64, 128], [1, 2, 4, 8], [2, 3], [0, 2, 4]):
        splits = max(1, int(load / per_sm))
        found[f"{m}x{n} w{w} s{s} x{splits}"] = (Launch(m, n, w, s), splits)
    return found


def copies(rounds: int) -> None:
    """Print the bandwidth of the cache update and of the merge as a share of a copy's."""
    tokens, heads, kv_heads, size, page = 32768, 32, 8, 128, 16
    source = torch.randn(512 << 20, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    keys = torch.randn(2, tokens * 4, kv_heads, size, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(tokens * 4, device="cuda")
    in_order = torch.arange(tokens * 4, device="cuda")
    pages = torch.zeros(tokens * 4 // page, 2, page, kv_heads, size, device="cuda", dtype=torch.bfloat16)
    small = pages.to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    parts = torch.randn(3, tokens, heads, size, device="cuda", dtype=torch.bfloat16)
    lses = torch.randn(3, tokens, heads, device="cuda")

    def write(cache_: torch.Tensor, where: torch.Tensor) -> Run:
        key, value = cache_.unbind(1)
        return lambda: cache.write_kv(keys[0], keys[1], key, value, where, one, one)

    hnd = pages.view(-1, 2, kv_heads, page, size)
    hnd_key, hnd_value = (half.transpose(1, 2) for half in hnd.unbind(1))
    runs: dict[str, tuple[Run, int]] = {
        "copy": (lambda: target.copy_(source), 2 * source.nbytes),
        "write_kv NHD": (write(pages, in_order), 2 * keys.nbytes),
        "write_kv NHD, random slots": (write(pages, slots), 2 * keys.nbytes),
        "write_kv HND": (
            lambda: cache.write_kv(keys[0], keys[1], hnd_key, hnd_value, in_order, one, one), 2 * keys.nbytes,
        ),
        "write_kv NHD fp8": (write(small, in_order), keys.nbytes * 3 // 2),
        "merge_attn_states": (
            lambda: merge.merge_attn_states(parts[0], parts[1], lses[1], parts[2], lses[2], lses[0]),
            parts.nbytes + lses.nbytes,
        ),
    }  # fmt: skip
    for run, _ in runs.values():
        run()
    times = flushed_times({name: run for name, (run, _) in runs.items()}, rounds)
    rates = {name: moved / times[name] / 1e6 for name, (_, moved) in runs.items()}
    for name, rate in rates.items():
        print(f"   {name:28s} {times[name]:8.1f} us  {rate:.2f} TB/s  share of copy {rate / rates['copy']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--peers", default="fa3,flashinfer,xqa")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--top", type=int, default=100)
    parser.add_argument("--only", default="", help="regex of sweep names")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    if re.search(arguments.cases, "copies"):
        copies(arguments.rounds)
    summary = []
    for case in CASES:
        if not re.search(arguments.cases, case.name):
            continue
        problem = Problem(case)
        built: dict[str, tuple[Run, torch.Tensor] | None] = {}
        for name in arguments.peers.split(","):
            if name:
                try:
                    built[name] = PEERS[name](problem)
                except Exception as error:
                    print(f"  {name}: {type(error).__name__} {str(error)[:100]}")
        built["own"] = own_decode(problem) if case.is_decode else own_prefill(problem)
        if arguments.sweep and case.is_decode:
            for name, (chosen, splits) in decode_sweep(case).items():
                if re.search(arguments.only, name):
                    built[name] = own_decode(problem, chosen, splits)
        elif arguments.sweep:
            for name, (chosen, gathered) in prefill_sweep(case).items():
                if re.search(arguments.only, name):
                    built[name] = own_prefill(problem, chosen, gathered)
        runs: dict[str, Run] = {}
        errors: dict[str, float] = {}
        for name, made in built.items():
            if made is None:
                continue
            try:
                made[0]()
                torch.cuda.synchronize()
                errors[name] = problem.error(made[1])
                if errors[name] > (0.05 if case.fp8 else 0.01):
                    print(f"  WRONG {case.name} {name}: {errors[name]:.1e}")
                runs[name] = made[0]
            except Exception as error:
                print(f"  {name}: {type(error).__name__} {str(error).splitlines()[0][:110] if str(error) else ''}")
        times = flushed_times(runs, arguments.rounds)
        best = min((time for name, time in times.items() if name in PEERS), default=float("nan"))
        lines = [f"{case.name}: best peer {best:.0f} us"]
        for name, time in sorted(times.items(), key=lambda item: item[1])[: arguments.top]:
            lines.append(f"   {name:28s} {time:8.1f} us  share {best / time:.3f}  error {errors[name]:.1e}")
        summary.append("\n".join(lines))
        print(summary[-1], flush=True)
        del problem, built, runs


if __name__ == "__main__":
    main()
