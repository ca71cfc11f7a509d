"""Context parallelism on the GPUs of one host: correctness, then times, each line written as it is known.

torchrun --nproc-per-node 2 measure/bench/context_parallel.py --out cp.jsonl conformance \\
    plugins/flash_attn/tests/test_flash_attn_conformance.py:TestFlashAttn --layers 10
torchrun --nproc-per-node 2 measure/bench/context_parallel.py --out cp.jsonl decode
torchrun --nproc-per-node 2 measure/bench/context_parallel.py --out cp.jsonl merge

``decode`` times one layer as a CUDA graph, on one GPU with all heads and the whole cache, and on all of them. ``merge``
times the ways to merge beside the collectives that they are made of.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attn_select import AttentionConfig, Environment, select
from attn_select.machine.environment import parse_pins
from attn_select.reference.timed_steps import AttentionStep
from attn_select.runtime import ContextParallel
from attn_select.runtime.context_parallel.merging import Merger
from attn_select.runtime.timer import Call, captured, medians, timed_rounds
from attn_select.testing.rank_conformance import check_on_group
from attn_select.times.ranks import collectives_us

MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LAYERS: dict[str, dict[str, Any]] = {
    "gqa": {"num_heads": 64, "num_kv_heads": 8, "head_size": 128, "block_size": 64},
    "mla": {"num_heads": 128, "block_size": 64, **MLA},
    "mla16": {"num_heads": 16, "block_size": 64, **MLA},
}
"""All ranks' heads together."""
BATCHES = ((1, 1 << 20), (4, 1 << 20), (32, 1 << 17))
"""Requests, and tokens of each."""
BACKENDS = {"gqa": ("FLASH_ATTN", "TRITON_ATTN"), "mla": ("FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA")}


class Lines:
    """Writes results, by rank 0."""

    def __init__(self, path: str | None, rank: int) -> None:
        self.file = open(path, "a", encoding="utf-8") if path and rank == 0 else None  # noqa: SIM115  # kept open
        self.rank = rank

    def write(self, **values: Any) -> None:
        line = json.dumps(values)
        if self.rank == 0:
            print(line, flush=True)
        if self.file is not None:
            self.file.write(line + "\n")
            self.file.flush()


def suite_of(text: str) -> Any:
    """Return a conformance suite, ``FILE:CLASS``."""
    path, _, name = text.partition(":")
    sys.path.insert(0, str(Path(path).parent))
    return getattr(importlib.import_module(Path(path).stem), name)()


def conformance(arguments: argparse.Namespace, lines: Lines) -> None:
    for text in arguments.suites:
        start = time.time()
        suite = suite_of(text)
        wrong = check_on_group(suite, None, arguments.layers, cuda_graphs=True, merge=arguments.merge)
        lines.write(
            kind="conformance", suite=text.rpartition(":")[2], backend=suite.spec.name, layers=arguments.layers,
            failed=len(wrong), wrong=[each[:700] for each in wrong[:4]], seconds=round(time.time() - start, 1),
        )  # fmt: skip


def timed(step: Call, repeat: int = 20) -> float:
    """Return the time of a step in us, the slowest rank's; a graph holds ``repeat`` of them."""
    step()  # compiles, so that a capture finds all there
    graph = captured([step] * repeat)
    dist.barrier()
    found = torch.tensor(medians(timed_rounds({"step": graph.replay}), 15)["step"] / repeat, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def layer_time(
    config: AttentionConfig, backend: str, batch: tuple[int, int], ranks: Any, pins: dict[str, str]
) -> float:
    """Return the time of a decode of one layer."""
    requests, tokens = batch
    choice: Any = {"decode": backend}
    selection = select(config, backend=choice, environment=Environment(pins=pins) if pins else None)
    step = AttentionStep(selection, [(1, tokens)] * requests, ["decode"], None, ranks)
    memory = step.memory(step.cache_bytes, 1)
    assert memory is not None
    step.make_layers(memory.caches(step))
    (call,) = step.calls()
    return timed(call)


def decode(arguments: argparse.Namespace, lines: Lines) -> None:
    pins = parse_pins(arguments.pins)
    for batch in BATCHES:
        for name in arguments.layer or LAYERS:
            for backend in arguments.backend or BACKENDS[name[:3]]:
                try:
                    decode_times(AttentionConfig(**LAYERS[name]), name, backend, batch, pins, arguments, lines)
                except Exception as error:  # the next one may run
                    text = f"{type(error).__name__}: {error}"
                    lines.write(kind="decode", layer=name, backend=backend, batch=batch, error=text[:500])
                finally:
                    torch.cuda.empty_cache()


def decode_times(
    whole: AttentionConfig, name: str, backend: str, batch: tuple[int, int], pins: dict[str, str],
    arguments: argparse.Namespace, lines: Lines,
) -> None:  # fmt: skip
    """Time one layer with its whole cache, with shares of it, and on all ranks; compare with what is predicted."""
    size, (requests, tokens) = dist.get_world_size(), batch
    alone = layer_time(whole, backend, batch, None, pins)
    counts = sorted({size, *arguments.shares})
    shares = {count: layer_time(whole, backend, (requests, tokens // count), None, pins) for count in counts}
    parts = {
        count: whole.model_copy(update={"num_heads": whole.num_heads // count, "decode_context_parallel_size": count})
        for count in shares
    }
    predicted = {count: share + collectives_us(parts[count], requests) for count, share in shares.items()}
    result = {
        way: layer_time(parts[size], backend, batch, ContextParallel(None, merge=way), pins) for way in arguments.ways
    }
    first = result[arguments.ways[0]]
    lines.write(
        kind="decode", layer=name, backend=backend, requests=requests, tokens=tokens,
        ranks=size, alone_us=round(alone, 2), shares_us={count: round(share, 2) for count, share in shares.items()},
        predicted_us={count: round(time_us, 2) for count, time_us in predicted.items()},
        ranks_us={way: round(time_us, 2) for way, time_us in result.items()},
        exchange_us=round(exchange_time(parts[size], requests), 2),
        efficiency=round(alone / size / first, 4), prediction=round(predicted[size] / first, 4),
    )  # fmt: skip


MERGES = {"gqa": (32, 8, 128, 128), "mla": (64, 1, 576, 512)}
"""Heads of one rank, KV heads, and the widths of queries and results."""
MERGE_TOKENS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)


def exchange(merger: Merger, query: torch.Tensor, width: int) -> Callable[[], None]:
    """Return what a decode of one rank's queries does between the ranks: it gathers them, and merges results."""
    (tokens, heads, _), size = query.shape, merger.collectives.size
    output = query.new_empty(tokens, heads, width)

    def step() -> None:
        gathered = merger.gather_queries(query)
        merger.merge(*merger.partials(gathered, heads * size, width), output)

    return step


def exchange_time(config: AttentionConfig, tokens: int) -> float:
    """Return the time in us of all that ranks do together in a decode of one layer: what no kernel can save."""
    device = torch.device("cuda", torch.cuda.current_device())
    merger = Merger(ContextParallel(None).collectives, config.num_kv_heads, True)
    heads, width = config.num_heads, config.kv_lora_rank or config.value_head_size
    sizes = heads * merger.collectives.size, config.head_size, width, torch.bfloat16, device
    merger.share_memory(tokens, *sizes)
    query = torch.randn(tokens, heads, config.head_size, dtype=torch.bfloat16, device=device)
    return timed(exchange(merger, query, width))


def merge_times(ranks: ContextParallel, name: str, tokens: int, shared: Merger) -> dict[str, float]:
    """Return the times in us of the ways to merge one case's results, and of the collectives by themselves."""
    (heads, kv_heads, query_width, width), collectives, size = MERGES[name], ranks.collectives, ranks.size
    device = torch.device("cuda", torch.cuda.current_device())
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    merger = Merger(collectives, kv_heads, True)
    partial = torch.randn(tokens, heads * size, width, **made)
    lse = torch.randn(tokens, heads * size, device=device)
    output, output_lse = torch.empty(tokens, heads, width, **made), torch.empty(tokens, heads, device=device)
    query = torch.randn(tokens, heads, query_width, **made)
    rows = partial.view(size, -1)
    gathered, moved = query.new_empty(size, *query.shape), torch.empty_like(rows)

    steps: dict[str, Callable[[], Any]] = {
        "a2a": lambda: merger.merge(partial, lse, output, output_lse),
        "gather_heads": lambda: merger.gather_heads(query),
        "both by a2a": lambda: (merger.gather_heads(query), merger.merge(partial, lse, output, output_lse)),
        **({"both by symm": exchange(shared, query, width)} if shared.holds(tokens) else {}),
        "nccl all_gather of queries": lambda: collectives.all_gather(gathered, query),
        "nccl all_to_all of outputs": lambda: collectives.all_to_all(moved, rows),
    }
    return {label: round(timed(step), 2) for label, step in steps.items()}


def merge(arguments: argparse.Namespace, lines: Lines) -> None:
    ranks = ContextParallel(None)
    device = torch.device("cuda", torch.cuda.current_device())
    for name, (heads, kv_heads, query_width, width) in MERGES.items():
        shared = Merger(ranks.collectives, kv_heads, True)
        sizes = heads * ranks.size, query_width, width, torch.bfloat16, device
        shared.share_memory(max(MERGE_TOKENS), *sizes, most_bytes=1 << 30)
        for tokens in MERGE_TOKENS:
            times = merge_times(ranks, name, tokens, shared)
            lines.write(kind="merge", layer=name, tokens=tokens, heads=heads, width=width, ranks=ranks.size, us=times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="append the lines to this file")
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("conformance")
    part.add_argument("suites", nargs="+", metavar="FILE:CLASS")
    part.add_argument("--layers", type=int, default=10)
    part.add_argument("--merge", help="of all layers; else drawn")
    part = commands.add_parser("decode")
    part.add_argument("--layer", action="append", choices=LAYERS)
    part.add_argument("--backend", action="append")
    part.add_argument("--ways", nargs="+", default=["auto", "a2a"], help="the first is compared")
    part.add_argument("--shares", nargs="*", type=int, default=[4, 8], help="other numbers of ranks to predict")
    part.add_argument("--with", dest="pins", action="append", default=[], metavar="NAME==VERSION", help="a library")
    commands.add_parser("merge")
    arguments = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    with torch.inference_mode():
        run = {"conformance": conformance, "decode": decode, "merge": merge}[arguments.command]
        run(arguments, Lines(arguments.out, rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
