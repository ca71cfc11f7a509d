"""Draw commands of ``attn-select flags`` by a seed: models x GPUs x ranks x caches x drafts, and now and then more."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
MODELS: dict[str, dict[str, Any]] = json.loads((FOLDER / "models.json").read_text("utf-8"))
"""Presets, published configs and those of issues, cut to a few layers, with the fields that vLLM asks for."""

GPUS = ("t4", "a100", "rtx3090", "l40s", "h100", "h20", "h200", "b200", "b300", "jetson-agx-thor", "rtx5090", "gb10")
AMD_AND_12X = ("mi210", "mi300x", "mi355x", "rx7900xtx", "rx9070xt", "rtx-pro-6000", "gb10")
GPU_SETS = {"nvidia": GPUS, "amd-and-12x": AMD_AND_12X}
"""What ``--gpus`` takes: the GPUs that commands are drawn for."""
CACHES = (None, None, None, "bfloat16", "fp8", "fp8", "fp8_e5m2", "fp8_ds_mla")
TENSOR_PARALLEL = (1, 1, 2, 4, 8, 16)
RANKS = (1,) * 12 + (2, 2, 3, 4)
DRAFTS = (0, 0, 1, 3, 7)
BLOCKS = (None, None, None, None, 16, 32, 64, 128)

# vLLM runs MiniCPM3 by other layers than attn-select reads, and `flags` says so in place of a backend. SGLang's reader
# refuses Gemma 4's heads of two sizes under the transformers that it is pinned to.
NOT_ASKED = {"vllm": ("minicpm3-4b",), "sglang": ("gemma-4", "gemma-4-e2b")}

ENCODERS = ("bert-base", "modernbert-base-classifier")
"""Models on which options of caches have no effect, so that `flags` refuses these."""


@dataclass(frozen=True)
class Drawn:
    """One command: what a user says to ``flags``.

    Attributes:
        model, gpu: as in ``MODELS`` and ``--gpu``.
        tensor_parallel, ranks, drafts: ranks that share heads, ranks that share contexts, tokens drafted per step.
        cache, block_size: None where the user leaves them.
        batch_invariant: whether it is asked for.
    """

    model: str
    gpu: str
    tensor_parallel: int = 1
    ranks: int = 1
    cache: str | None = None
    drafts: int = 0
    block_size: int | None = None
    batch_invariant: bool = False

    def words(self) -> list[str]:
        """Return the options beside model and GPU."""
        words = ["-tp", str(self.tensor_parallel)]
        words += ["--dcp", str(self.ranks)] if self.ranks > 1 else []
        words += ["--kv-cache-dtype", self.cache] if self.cache else []
        words += ["--speculative-tokens", str(self.drafts)] if self.drafts else []
        words += ["--block-size", str(self.block_size)] if self.block_size else []
        return words + (["--batch-invariant"] if self.batch_invariant else [])


def divides(ranks: int, model: str) -> bool:
    """Whether ranks share a model's heads evenly: SGLang's ``ServerArgs`` does not look."""
    config = MODELS[model].get("text_config") or MODELS[model]
    heads = next(
        config[name] for name in ("num_attention_heads", "n_head", "decoder_attention_heads") if name in config
    )
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def draw(engine: str, count: int, seed: int, gpus: Sequence[str] = GPUS) -> Iterator[Drawn]:
    """Yield as many different commands."""
    chance = random.Random(f"{engine} {seed}")
    seen: set[Drawn] = set()
    models = [model for model in MODELS if model not in NOT_ASKED[engine]]
    while len(seen) < count:
        model = chance.choice(models)
        sparse = "index_topk" in (MODELS[model].get("text_config") or MODELS[model])
        odd = engine == "vllm" and chance.random() < 0.1
        one = Drawn(
            model=model,
            gpu=chance.choice(gpus),
            tensor_parallel=chance.choice([size for size in TENSOR_PARALLEL if odd or divides(size, model)]),
            ranks=chance.choice(RANKS) if engine == "vllm" else 1,
            cache=chance.choice(CACHES if sparse else CACHES[:-1]),
            drafts=chance.choice(DRAFTS),
            block_size=chance.choice(BLOCKS),
            batch_invariant=chance.random() < 0.05,
        )
        if model in ENCODERS:
            one = replace(one, ranks=1, cache=None, drafts=0, block_size=None)
        if one not in seen:
            seen.add(one)
            yield one
