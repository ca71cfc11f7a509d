"""What ``select`` decides for drawn layers on every known GPU, as a file: compare two versions of this project by it.

    python tests/decision/drawn_decisions.py before.jsonl            # in one checkout
    python tests/decision/drawn_decisions.py after.jsonl             # in the other
    python tests/decision/drawn_decisions.py --compare before.jsonl after.jsonl

A line holds the layer, the GPU, and what was decided: backend per phase, KV layout, block size, and the codes of the
reasons against every candidate. Words are left out. The comparison exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from attn_select import AttentionConfig, ConfigError, select
from attn_select.machine.device import known_gpus

MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def drawn_fields(random_: random.Random) -> dict[str, Any]:
    """Return the fields of a layer, contradictory ones included: mostly plain, each feature now and then."""
    chance, choice = random_.random, random_.choice
    fields: dict[str, Any] = {
        "dtype": choice(["bfloat16"] * 6 + ["float16", "float16", "float32"]),
        "kv_cache_dtype": choice(["auto"] * 6 + ["fp8_e4m3"] * 3 + ["fp8_e5m2", "bfloat16", "float16", "nvfp4"]),
        "block_size": choice([None] * 4 + [1, 8, 16, 16, 32, 64, 128, 256, 48]),
        "cuda_graph": choice(["NEVER"] * 3 + ["UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]),
        "num_speculative_tokens": choice([0] * 6 + [1, 3, 7]),
    }
    if chance() < 0.3:
        fields |= {**MLA, "num_heads": choice([8, 16, 32, 64, 128, 40])}
        if chance() < 0.2:
            fields["kv_lora_rank"] = choice([128, 256, 576])
        if chance() < 0.3:
            fields |= {"sparse_top_k": 2048, "kv_cache_dtype": choice(["auto", "fp8_ds_mla"])}
    else:
        kv_heads = choice([1, 2, 4, 8, 16])
        fields |= {
            "num_heads": kv_heads * choice([1, 1, 2, 4, 7, 8]),
            "num_kv_heads": kv_heads,
            "head_size": choice([128] * 6 + [64, 64, 32, 80, 96, 112, 160, 192, 256, 256, 512, 72, 100]),
            "attn_type": choice(["decoder"] * 9 + ["encoder", "encoder_only", "encoder_decoder"]),
        }
        if chance() < 0.05:
            fields["v_head_size"] = choice([64, 128])
    flags: dict[str, tuple[float, Any]] = {
        "sliding_window": (0.2, choice([128, 1024, 4096])),
        "logits_soft_cap": (0.1, 30.0),
        "alibi": (0.07, True),
        "sinks": (0.12, True),
        "mm_prefix": (0.05, True),
        "non_causal": (0.05, True),
        "batch_invariant": (0.07, True),
        "per_head_quant_scales": (0.04, True),
        "output_quantization": (0.06, choice(["fp8", "fp4"])),
        "decode_context_parallel_size": (0.06, choice([2, 4])),
    }
    fields |= {name: value for name, (share, value) in flags.items() if chance() < share}
    return fields


def write(path: Path, count: int, seed: int) -> None:
    """Write the decisions on ``count`` layers; GPUs take turns."""
    random_, gpus = random.Random(seed), list(known_gpus())
    with path.open("w") as file:
        written = 0
        while written < count:
            fields = drawn_fields(random_)
            try:
                config = AttentionConfig(**fields)
            except ConfigError:
                continue
            gpu = gpus[written % len(gpus)]
            selection = select(config, gpu)
            line = {
                "gpu": gpu,
                "layer": {name: value for name, value in fields.items() if value is not None},
                "selected": selection.selected,
                "kv_layout": selection.kv_layout,
                "block_size": selection.block_size,
                "candidates": {
                    candidate.backend: {
                        phase: [verdict.verdict, sorted(reason.code for reason in verdict.reasons)]
                        for phase, verdict in candidate.phases.items()
                    }
                    for candidate in selection.candidates
                },
            }
            file.write(json.dumps(line) + "\n")
            written += 1


def compare(before: Path, after: Path) -> int:
    """Print what differs, by kind, with an example each; return how many lines do."""
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    with before.open() as left, after.open() as right:
        for number, (a, b) in enumerate(zip(map(json.loads, left), map(json.loads, right), strict=True), 1):
            found = [key for key in ("gpu", "layer", "selected", "kv_layout", "block_size") if a[key] != b[key]]
            found += [
                f"candidate {name}"
                for name in sorted({*a["candidates"], *b["candidates"]})
                if a["candidates"].get(name) != b["candidates"].get(name)
            ]
            if found:
                kind = ", ".join(found)
                kinds[kind] += 1
                examples.setdefault(kind, f"line {number}: {json.dumps(a)}\n  became {json.dumps(b)}")
    for kind, times in kinds.most_common():
        print(f"{times} × {kind}\n  {examples[kind]}")
    print(f"{sum(kinds.values())} of {number} decisions differ")
    return sum(kinds.values())


def main() -> None:
    """Write a file of decisions, or compare two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="the file to write, or with --compare the two to compare")
    parser.add_argument("--compare", action="store_true", help="compare two files")
    parser.add_argument("--count", type=int, default=20_000, help="layers to draw (default: 20000)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    arguments = parser.parse_args()
    if arguments.compare and len(arguments.files) == 2:
        sys.exit(1 if compare(*arguments.files) else 0)
    if arguments.compare or len(arguments.files) != 1:
        parser.error("one file to write, or --compare with two files")
    write(arguments.files[0], arguments.count, arguments.seed)


if __name__ == "__main__":
    main()
