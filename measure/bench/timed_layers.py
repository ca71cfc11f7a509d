"""The layers that times are collected for and held-out workloads are drawn for, and what both scripts share."""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attn_select import AttentionConfig, Environment
from attn_select.decide.selector import environment_for
from attn_select.layer.models import configs_from_model
from attn_select.machine.detection import detect_device
from attn_select.machine.environment import parse_pins
from attn_select.times.batch_shape import BatchShape
from attn_select_measure.benching import Bench, Timed, TimedBatch

MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GQA = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}
LAYERS: dict[str, AttentionConfig] = {
    "gqa": AttentionConfig(**GQA),
    "mla128": AttentionConfig(num_heads=128, **MLA),
    "mla16": AttentionConfig(num_heads=16, **MLA),
    "gqa-fp8": AttentionConfig(**GQA, kv_cache_dtype="fp8_e4m3"),
    "sinks": AttentionConfig(num_heads=64, num_kv_heads=8, head_size=64, sinks=True, sliding_window=128),
    "mla128-fp8": AttentionConfig(num_heads=128, **MLA, kv_cache_dtype="fp8_e4m3"),
    "mla16-fp8": AttentionConfig(num_heads=16, **MLA, kv_cache_dtype="fp8_e4m3"),
    "mha": AttentionConfig(num_heads=32, num_kv_heads=32, head_size=128),
    "window": AttentionConfig(num_heads=32, num_kv_heads=16, head_size=128, sliding_window=1024),
    "speculative": AttentionConfig(**GQA, num_speculative_tokens=3),
}
"""Llama-3-8B, DeepSeek-V3 whole and on eight ranks, gpt-oss's windowed layers, Llama-2-7B, Gemma-3-27B's windowed
layers, and Llama-3-8B that verifies three drafts; the most asked for first."""


def _mha(heads: int, kv_heads: int, size: int = 128, **more: Any) -> AttentionConfig:
    return AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_size=size, **more)


FP8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
FURTHER: dict[str, AttentionConfig] = {
    "kv1": _mha(8, 1),
    "kv2": _mha(8, 2),
    "kv4": _mha(32, 4),
    "kv1-fp8": _mha(8, 1, **FP8),
    "mha8": _mha(8, 8),
    "group16": _mha(64, 4),
    "group5": _mha(40, 8),
    "size64": _mha(32, 8, 64),
    "size64-kv1": _mha(8, 1, 64),
    "size64-group7": _mha(14, 2, 64),
    "size96": _mha(32, 32, 96),
    "size256": _mha(16, 8, 256),
    "size256-kv1": _mha(8, 1, 256),
    "size256-fp8": _mha(16, 8, 256, **FP8),
    "cap": _mha(32, 16, 128, logits_soft_cap=50.0),
    "cap-256": _mha(16, 8, 256, logits_soft_cap=50.0),
    "window-cap": _mha(32, 16, 128, logits_soft_cap=50.0, sliding_window=4096),
    "window-kv2": _mha(16, 2, 128, sliding_window=1024),
    "window-256": _mha(8, 4, 256, sliding_window=512),
    "sinks-whole": _mha(64, 8, 64, sinks=True),
    "sinks-kv1": _mha(8, 1, 64, sinks=True, sliding_window=128),
    "drafts1": _mha(32, 8, num_speculative_tokens=1),
    "drafts7": _mha(32, 8, num_speculative_tokens=7),
    "drafts3-kv1": _mha(8, 1, num_speculative_tokens=3),
    "drafts3-fp8": _mha(32, 8, num_speculative_tokens=3, **FP8),
    "mla8": AttentionConfig(num_heads=8, **MLA),
    "mla32": AttentionConfig(num_heads=32, **MLA),
    "mla64": AttentionConfig(num_heads=64, **MLA),
    "mla32-fp8": AttentionConfig(num_heads=32, **MLA, **FP8),
    "mla128-drafts": AttentionConfig(num_heads=128, **MLA, num_speculative_tokens=3),
}
"""Kinds that span the axes of a model for all layers of a kernel: KV heads, heads per KV head, head size, bytes of the
cache, window, soft cap, sinks, drafts, MLA's heads. None was measured so far."""
UNSEEN = (
    ("gpt-oss-120b", 8, "full_attention", "auto"),
    ("kimi-k3", 2, "mla", "auto"),
    ("deepseek-v2-lite", 2, "mla", "fp8_e4m3"),
    ("olmo-3.1-32b", 8, "full_attention", "auto"),
    ("gemma-2-9b", 8, "full_attention", "auto"),
    ("minicpm3-4b", 1, "mla", "auto"),
    ("qwen3-30b-a3b", 2, "full_attention", "fp8_e4m3"),
    ("gemma-2-27b", 8, "sliding_attention", "auto"),
    ("mistral-7b", 8, "full_attention", "fp8_e4m3"),
    ("phi-3-mini", 1, "sliding_attention", "auto"),
    ("gemma-4", 4, "full_attention", "auto"),
    ("qwen3-8b", 8, "full_attention", "auto"),
    ("qwen3-235b-a22b", 4, "full_attention", "auto"),
    ("phi-3-mini-128k", 8, "sliding_attention", "auto"),
    ("glm-4.5", 2, "full_attention", "auto"),
)
"""Presets, tensor-parallel ranks, kinds of layers and cache dtypes of the layers that judge such a model: never fitted,
and not looked at before. ``random.Random(20261124)`` drew them from the presets of 2026-11-24 (commit "Benches know 30
further kinds of layers"); presets that came later would change the draw."""


def unseen() -> dict[str, AttentionConfig]:
    """Return the layers of ``UNSEEN`` by name."""
    found = {}
    for name, ranks, kind, cache in UNSEEN:
        kinds = configs_from_model(name, tensor_parallel=ranks, overrides={"kv_cache_dtype": cache}).kinds
        suffix = "" if cache == "auto" else "-fp8"
        found[f"{name}-tp{ranks}-{kind}{suffix}"] = next(each.config for each in kinds if each.kind == kind)
    return found


MOST_SECONDS = 4.0
"""Of rounds for one batch; slow ones have fewer."""
SLOW = ("FLEX_ATTENTION", "PAGED_ATTENTION", "TORCH_SDPA", "TORCH_MLA")
"""Left out on a GPU: the packaged rules put them last, and FLEX_ATTENTION compiles for each shape."""
TINY = {
    "gqa": AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32),
    "mla16": AttentionConfig(num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16),
    "speculative": AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, num_speculative_tokens=3),
}
"""What a CPU is tried with."""


PAIR = " + "
"""Between the names of two backends that share a batch: the one of its prefills, and the one of its decodes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One batch of one layer, by name; ``kind`` is what it is an example of."""

    layer: str
    batch: BatchShape
    kind: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.layer, str(self.batch)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what both scripts take."""
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: tiny layers, torch's backends")
    parser.add_argument("--with", dest="pins", action="append", default=[], metavar="NAME==VERSION")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the results (default: here)")
    parser.add_argument("--seconds", type=float, default=420.0, help="begin nothing new after this long (default: 420)")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each batch (default: 12)")
    parser.add_argument("--layers", default="", help="only these, separated by commas")
    parser.add_argument(
        "--set", dest="layer_set", choices=("known", "further", "unseen"), default="known",
        help="the ten kinds that are packaged, 30 that span every axis, or 15 that nothing is fitted to",
    )  # fmt: skip


def layers_of(arguments: argparse.Namespace) -> dict[str, AttentionConfig]:
    """Return the layers that the options ask for."""
    sets = {"known": LAYERS, "further": FURTHER, "unseen": unseen()}
    known = TINY if arguments.device == "cpu" else sets[arguments.layer_set]
    names = arguments.layers.split(",") if arguments.layers else [*known]
    return {name: known[name] for name in names}


def environment_of(arguments: argparse.Namespace) -> Environment:
    """Return this machine's environment with the given versions."""
    return environment_for(detect_device().device, parse_pins(arguments.pins))


def measured(
    bench: Bench, config: AttentionConfig, batch: BatchShape, only: Sequence[str] = (), compare: bool = True
) -> TimedBatch:
    """Measure the named backends, or all but the slow ones; ``compare`` checks their results too."""
    candidates = [each for each in bench.candidates(config, batch) if not only or each.name in only]
    if bench.on_gpu:
        candidates = [each for each in candidates if each.name not in SLOW]
    return bench.measure(config, batch, candidates, MOST_SECONDS, compare)


def raw(bench: Bench, point: Point, config: AttentionConfig, found: TimedBatch) -> dict[str, Any]:
    """Return everything about one point as data: the samples of every round, and what failed."""
    alone = replace(found, timed=[timed for timed in found.timed if PAIR not in timed.backend])
    libraries = {name: each for m in bench.measurements(config, alone) for name, each in m.libraries.items()}
    return {
        "layer": point.layer,
        "batch": str(point.batch),
        "kind": point.kind,
        "gpu": bench.gpu,
        "gpu_name": bench.device.name,
        "config": config.model_dump(exclude_defaults=True),
        "libraries": libraries,
        "roofline_us": found.roofline_us,
        "timed": [rounds_of(timed) for timed in found.timed],
    }


def rounds_of(timed: Timed) -> dict[str, Any]:
    """Return what was measured of one candidate as data."""
    return {
        "backend": timed.backend,
        "kernel": dict(timed.kernel),
        "block_size": timed.block_size,
        "samples_us": [round(sample, 3) for sample in timed.samples_us],
        "method": timed.method,
        "why_eager": timed.why_eager,
        "first_call_s": round(timed.first_call_s, 3),
        "error": timed.error,
        "bound": timed.bound,
        "failure": timed.failure,
    }


def append(path: Path, data: Mapping[str, Any]) -> None:
    """Append one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(data) + "\n")


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what ``append`` wrote, also from a file that was compressed with xz since."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        yield from (json.loads(line) for line in file if line.strip())


def line(point: Point, found: TimedBatch) -> str:
    """Return one line that says what came out."""
    parts = []
    for timed in found.timed:
        if timed.failure is not None:
            parts.append(f"{timed.backend} FAILED: {timed.failure}")
        else:
            marks = ("" if timed.method == "graph" else " eager") + ("" if timed.exact else f" ERROR {timed.error:.1e}")
            parts.append(f"{timed.backend} {timed.time_us:.1f}{marks}")
    return f"{point.layer:12s} {point.batch!s:24s} " + ", ".join(parts)
