"""Context parallelism on the GPUs of one host: correctness, then times, each line written as it is known.

torchrun --nproc-per-node 2 measure/bench/context_parallel.py --out cp.jsonl conformance \\
    plugins/flash_attn/tests/test_flash_attn_conformance.py:TestFlashAttn --layers 10
torchrun --nproc-per-node 2 measure/bench/context_parallel.py --out cp.jsonl decode

``decode`` times one layer as a CUDA graph: on one GPU with all heads and the whole cache, with one rank's share of the
keys, and on all GPUs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attn_select import AttentionConfig, Environment, select
from attn_select.machine.environment import parse_pins
from attn_select.reference.timed_steps import AttentionStep
from attn_select.runtime import ContextParallel
from attn_select.runtime.timer import Call, captured, medians, timed_rounds
from attn_select.testing.rank_conformance import check_on_group

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
    """Time one layer with its whole cache, with one rank's share of it, and on all ranks."""
    size, (requests, tokens) = dist.get_world_size(), batch
    alone = layer_time(whole, backend, batch, None, pins)
    share = layer_time(whole, backend, (requests, tokens // size), None, pins)
    part = whole.model_copy(update={"num_heads": whole.num_heads // size, "decode_context_parallel_size": size})
    result = {way: layer_time(part, backend, batch, ContextParallel(None, merge=way), pins) for way in arguments.ways}
    lines.write(
        kind="decode", layer=name, backend=backend, requests=requests, tokens=tokens,
        ranks=size, alone_us=round(alone, 2), share_us=round(share, 2),
        ranks_us={way: round(time_us, 2) for way, time_us in result.items()},
        efficiency=round(alone / size / result[arguments.ways[0]], 4),
    )  # fmt: skip


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
    part.add_argument("--with", dest="pins", action="append", default=[], metavar="NAME==VERSION", help="a library")
    arguments = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    with torch.inference_mode():
        run = {"conformance": conformance, "decode": decode}[arguments.command]
        run(arguments, Lines(arguments.out, rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
