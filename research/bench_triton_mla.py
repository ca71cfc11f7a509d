"""Time MLA decode against the vendors' kernels on one GPU: interleaved CUDA graphs, L2 flushed, medians, checked first.

Run ``python research/bench_triton_mla.py [--cases REGEX] [--rounds N] [--variants] [--peers NAMES]``. Peers
that cannot be imported are left out.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from attn_select.runtime.timer import flushed_times
from attn_select_triton.kernels import mla_decode
from attn_select_triton.kernels.mla_decode import MLALaunch

Run = Callable[[], Any]
RANK, ROPE, SCALE = 512, 64, 192**-0.5


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    seq_len: int
    heads: int
    query_len: int = 1
    page: int = 64
    fp8: bool = False


CASES = [
    Case("H128 B64 S4096", 64, 4096, 128),
    Case("H128 B1 S32768", 1, 32768, 128),
    Case("H16 B128 S2048", 128, 2048, 16),
    Case("H128 B64 S4000", 64, 4000, 128),
    Case("H16 q2 B64 S4096", 64, 4096, 16, 2),
    Case("H32 B64 S4096", 64, 4096, 32),
    Case("H16 B1 S32768", 1, 32768, 16),
    Case("H128 B64 S4096 p16", 64, 4096, 128, page=16),
    Case("H16 B128 S2048 p16", 128, 2048, 16, page=16),
    Case("H128 B64 S4096 fp8", 64, 4096, 128, fp8=True),
    Case("H16 B128 S2048 fp8", 128, 2048, 16, fp8=True),
]


class Problem:
    """The tensors of a case, pages in random order."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        pages = -(-case.seq_len // case.page)
        blocks = case.batch * pages
        self.cache = torch.randn(blocks, case.page, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
        if case.fp8:
            self.cache = self.cache.to(torch.float8_e4m3fn)
        self.table = torch.randperm(blocks, device="cuda").int().view(case.batch, pages)
        self.tokens = case.batch * case.query_len
        self.query = torch.randn(self.tokens, case.heads, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
        self.seq_lens = torch.full((case.batch,), case.seq_len, device="cuda", dtype=torch.int32)
        self.start_loc = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * case.query_len
        self.output = torch.full((self.tokens, case.heads, RANK), torch.nan, device="cuda", dtype=torch.bfloat16)
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def reference(self) -> torch.Tensor:
        """Return the first and last requests' outputs in float32."""
        case, found = self.case, []
        for request in (0, case.batch - 1):
            keys = self.cache[self.table[request].long()].view(-1, RANK + ROPE)[: case.seq_len].float()
            rows = self.query[request * case.query_len : (request + 1) * case.query_len].float()
            scores = torch.einsum("qhd,sd->qhs", rows, keys) * SCALE
            limit = case.seq_len - case.query_len + 1 + torch.arange(case.query_len, device="cuda")
            hidden = torch.arange(case.seq_len, device="cuda")[None] >= limit[:, None]
            weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
            found.append(torch.einsum("qhs,sd->qhd", weights, keys[:, :RANK]))
        return torch.cat(found)

    def error(self, output: torch.Tensor, reference: torch.Tensor) -> float:
        query_len = self.case.query_len
        seen = output.view(self.tokens, self.case.heads, RANK)
        seen = torch.cat([seen[:query_len], seen[-query_len:]]).float()
        return float((seen - reference).norm() / reference.norm())


def ours(problem: Problem, launch: MLALaunch, splits: int | None = None) -> Run:
    case = problem.case
    rows = case.heads * case.query_len
    programs = case.batch * -(-rows // launch.block_m)
    if splits is None:
        splits = mla_decode.mla_num_splits(programs, case.seq_len, problem.sms)
    workspace = torch.empty(problem.tokens * case.heads * splits * (RANK + 1), device="cuda") if splits > 1 else None

    def run() -> torch.Tensor:
        mla_decode.mla_decode(
            problem.query, problem.cache, problem.output, query_start_loc=problem.start_loc, seq_lens=problem.seq_lens,
            block_table=problem.table, max_query_len=case.query_len, scale=SCALE, launch=launch, num_splits=splits,
            workspace=workspace,
        )  # fmt: skip
        return problem.output

    return run


def default_launch(problem: Problem) -> MLALaunch:
    case = problem.case
    return mla_decode.mla_launch(
        torch.cuda.get_device_capability(), case.heads * case.query_len, RANK, ROPE, case.page, torch.bfloat16,
        problem.cache.dtype,
    )  # fmt: skip


def variants(problem: Problem) -> dict[str, Run]:
    """Return launches to compare: name, what runs."""
    case, found = problem.case, {}
    rows = case.heads * case.query_len
    if case.page % 64 == 0 and not case.fp8:
        for block_m in (16, 32, 64):
            for splits in (1, 2, 4) if rows <= block_m or block_m == 64 else ():
                found[f"hopper m{block_m} s{splits}"] = ours(problem, MLALaunch(block_m, 64, 4, 1, True, True), splits)
    tall = ((64, 8, 2), (32, 8, 2), (32, 8, 3))
    for block_n, warps, stages in tall if rows > 16 else ((64, 4, 2), (32, 4, 2), (32, 4, 3), (16, 4, 4)):
        for described in (True, False) if case.page % block_n == 0 else (False,):
            name = f"plain n{block_n} w{warps} s{stages} {'tma' if described else 'ptr'}"
            found[name] = ours(problem, MLALaunch(64 if rows > 16 else 16, block_n, warps, stages, described))
    return found


def flashmla(problem: Problem) -> Run:
    interface = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")
    case = problem.case
    query = problem.query.view(case.batch, case.query_len, case.heads, RANK + ROPE)
    cache = problem.cache.unsqueeze(2)
    # The schedule is made once a step, not once a layer: it is filled here and stays out of the time.
    schedule = interface.get_mla_metadata()[0]

    def run() -> torch.Tensor:
        output, _ = interface.flash_mla_with_kvcache(
            query, cache, problem.table, problem.seq_lens, RANK, schedule, None, softmax_scale=SCALE, causal=True
        )
        return output

    run()
    return run


def fa3(problem: Problem) -> Run:
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    case = problem.case
    metadata = interface.get_scheduler_metadata(
        batch_size=case.batch, max_seqlen_q=case.query_len, max_seqlen_k=case.seq_len, num_heads_q=case.heads,
        num_heads_kv=1, headdim=ROPE, headdim_v=RANK, cache_seqlens=problem.seq_lens, qkv_dtype=torch.bfloat16,
        cu_seqlens_q=problem.start_loc, page_size=case.page, causal=True,
    )  # fmt: skip
    cache = problem.cache.unsqueeze(2)
    output = torch.empty_like(problem.output)

    def run() -> torch.Tensor:
        interface.flash_attn_varlen_func(
            problem.query[..., RANK:], cache[..., RANK:], cache[..., :RANK], max_seqlen_q=case.query_len,
            cu_seqlens_q=problem.start_loc, max_seqlen_k=case.seq_len, seqused_k=problem.seq_lens,
            block_table=problem.table, q_v=problem.query[..., :RANK], softmax_scale=SCALE, causal=True, out=output,
            fa_version=3, scheduler_metadata=metadata,
        )  # fmt: skip
        return output

    return run


def flashinfer_fa3(problem: Problem) -> Run:
    flashinfer = importlib.import_module("flashinfer")
    case = problem.case
    workspace = torch.zeros(256 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    pages = problem.table.shape[1]
    indptr = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * pages
    wrapper.plan(
        problem.start_loc, indptr, problem.table.flatten(), problem.seq_lens, case.heads, RANK, ROPE, case.page, True,
        SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    latent, rope = problem.query.split([RANK, ROPE], -1)
    key, key_rope = problem.cache.split([RANK, ROPE], -1)
    output = torch.empty_like(problem.output)

    def run() -> torch.Tensor:
        wrapper.run(latent, rope, key, key_rope, out=output)
        return output

    return run


PEERS: dict[str, Callable[[Problem], Run]] = {"FlashMLA": flashmla, "FA3": fa3, "FlashInfer": flashinfer_fa3}


def captured(run: Run) -> torch.cuda.CUDAGraph:
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=".")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--variants", action="store_true", help="time other launches too")
    parser.add_argument("--peers", default="FlashMLA,FA3,FlashInfer")
    arguments = parser.parse_args()
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; us (error)"]
    for case in CASES:
        if not re.search(arguments.cases, case.name):
            continue
        problem = Problem(case)
        reference = problem.reference()
        runs: dict[str, Run] = {"ours": ours(problem, default_launch(problem))}
        if arguments.variants:
            runs.update(variants(problem))
        chosen = [] if case.fp8 or case.page != 64 else arguments.peers.split(",")
        errors, graphs, kept = {}, {}, []
        for name in [*runs, *chosen]:
            try:
                run = runs.get(name) or PEERS[name](problem)
                kept.append(run)  # a graph holds addresses, not tensors
                problem.output.fill_(torch.nan)
                errors[name] = problem.error(run(), reference)
                graphs[name] = captured(run)
            except Exception as error:
                lines.append(f"  {case.name} {name}: {type(error).__name__}: {str(error)[:300]}")
                print(lines[-1], flush=True)
        medians = flushed_times({name: graph.replay for name, graph in graphs.items()}, arguments.rounds)
        best = min((medians[name] for name in chosen if name in medians), default=0.0)
        lines.append(f"{case.name}:")
        for name, median in medians.items():
            share = f" share {best / median:.2f}" if best else ""
            lines.append(f"    {name:24s} {median:8.1f}{share}  ({errors[name]:.1e})")
        print("\n".join(lines[-len(medians) - 1 :]), flush=True)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
