"""Draws what a survey times: a layer and a batch at once, from the space of real models and of what services ask them.

Half of the layers are of models that are known by name, on as many ranks as somebody may run them on; the other half
are put together from sizes that models have. Lengths and numbers of requests are log-uniform. Families of layers and
phases take turns, so that every one gets its share, however many workloads are drawn. Workload ``i`` of a seed is the
same whatever is drawn beside it, and on every device. Layers that keep a state have numbers of their own.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

from attn_select.errors import AttnSelectError
from attn_select.layer.checked import DType
from attn_select.layer.config import MLA_DIMS, AttentionConfig
from attn_select.layer.layer_config import LayerConfig
from attn_select.layer.layouts import FLASH_ATTN_NHD, MLA, bytes_per_slot, bytes_per_token
from attn_select.layer.models import configs_from_model
from attn_select.layer.models.presets import presets
from attn_select.layer.state import RecurrenceName, StateConfig
from attn_select.machine.device import lookup
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.roofline import roofline_us
from attn_select_measure.survey_records import Record
from attn_select_measure.timed_fields import timed_fields

# In turn; their number and that of ``PHASES`` have no common factor, so that every pair comes up.
FAMILIES = (
    "gqa", "mla", "window", "gqa", "sinks", "fp8", "sparse", "mla", "gqa", "drafts", "mla fp8", "gqa", "cap",
    "sparse", "gqa", "mla", "window", "fp8", "mla drafts", "gqa", "drafts", "sinks", "sparse", "mla fp8", "gqa",
)  # fmt: skip
# Decodes of one length, of few long ones among many short (``uneven``) and of many lengths (``spread``); whole prompts;
# prompts with history (``chunk``); both kinds in one step.
PHASES = (
    "decode", "prefill", "uneven", "mixed", "decode", "chunk", "spread",
    "decode", "mixed", "uneven", "prefill", "spread", "chunk", "decode",
)  # fmt: skip
FIRST_STATE = 1_000_000  # The number of a seed's first workload of a layer that keeps a state
STATE_FAMILIES: tuple[RecurrenceName, ...] = (
    "gated_delta_net", "mamba2", "kda", "gated_delta_net", "mamba2", "lightning",
)  # fmt: skip
STATE_PHASES = ("decode", "prefill", "decode", "mixed", "chunk", "decode", "prefill")  # In turn, as ``PHASES``
# Key heads, value heads and their sizes: of whole models, which ranks share.
STATE_SIZES: Mapping[RecurrenceName, Sequence[tuple[int, int, int, int]]] = {
    # Qwen3-Next and Qwen3.5: 35B; 2B, 9B and 27B, 397B.
    "gated_delta_net": ((16, 32, 128, 128), (16, 16, 128, 128), (16, 48, 128, 128), (16, 64, 128, 128)),
    "kda": ((32, 32, 128, 128), (64, 64, 128, 128), (96, 96, 128, 128)),  # Kimi Linear, GLM-5.3-Flash, Kimi K3
    # Nemotron-H 8B, Nemotron 3 Nano, Granite 4 H small and tiny, Codestral Mamba's sizes, Falcon-H1 34B.
    "mamba2": (
        (8, 128, 128, 64), (8, 64, 128, 64), (1, 128, 128, 64), (1, 48, 128, 64), (8, 64, 128, 128), (2, 32, 256, 128),
    ),
    "lightning": ((64, 64, 128, 128), (32, 32, 128, 128)),  # MiniMax-01, Ling
}  # fmt: skip
STATE_DTYPES: Sequence[DType] = ("float32", "float32", "float32", "bfloat16")
OF_MODELS = 0.5  # Share of the layers that are of known models, where the family has some
MOST_US = 6000.0  # What a step may take by an H100's roofline
MOST_CACHE_BYTES = 4 << 30  # Of one layer: 32 of them fill a large GPU
RANKS: Mapping[int, float] = {1: 4, 2: 3, 4: 3, 8: 3, 16: 1}  # Tensor-parallel degrees and their weights
HEAD_SIZES: Mapping[int, float] = {64: 3, 80: 1, 96: 1, 112: 0.5, 128: 8, 192: 1, 256: 3, 512: 0.5}
KV_HEADS: Mapping[int, float] = {1: 4, 2: 3, 4: 3, 8: 4, 16: 1, 32: 1}
# Query heads per KV head.
GROUPS: Mapping[int, float] = {1: 3, 2: 2, 3: 0.5, 4: 4, 5: 1, 6: 0.5, 7: 1, 8: 3, 10: 0.5, 12: 0.5, 16: 2}
MOST_HEADS = 128
WINDOWS: Mapping[int, float] = {128: 2, 512: 2, 1024: 3, 2048: 1, 4096: 3}
DRAFTS: Mapping[int, float] = {1: 3, 2: 1, 3: 3, 4: 1, 5: 1, 7: 2}
MLA_HEADS: Mapping[int, float] = {8: 2, 16: 4, 32: 2, 64: 2, 128: 3}
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MLA_SIZES: Sequence[tuple[dict[str, int], float]] = (
    (DEEPSEEK, 8),
    ({"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}, 1),  # MiniCPM3
    ({"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}, 1),  # GLM-5
)


@dataclass(frozen=True, slots=True)
class Space:
    """How large what is drawn may be."""

    requests: int = 512  # most requests of a step
    # least and most tokens of a request that decodes, or of a prompt's history
    contexts: tuple[int, int] = (64, 1 << 18)
    prompts: tuple[int, int] = (16, 1 << 15)  # least and most new tokens of a request that prefills
    tokens: int = 1 << 15  # most new tokens of a step
    tiny: bool = False  # whether layers are of a size for a CPU


SPACE = Space()
TINY = Space(requests=4, contexts=(8, 64), prompts=(4, 24), tokens=64, tiny=True)  # What a CPU is tried with


@dataclass(frozen=True, slots=True)
class Work:
    """One workload to be timed."""

    row: Record  # its record so far; without ``timed`` where it has none
    config: LayerConfig
    batch: BatchShape


def work_of(seed: int, number: int, family: str, phase: str, config: LayerConfig, batch: BatchShape) -> Work:
    """Return a workload that has no times yet."""
    row = {
        "seed": seed,
        "number": number,
        "family": family,
        "phase": phase,
        "kind": kind_of(config),
        "config": timed_fields(config),
        "batch": str(batch),
    }
    return Work(row, config, batch)


def draw(seed: int, number: int, space: Space = SPACE) -> Work:
    """Return workload ``number`` of a seed; from ``FIRST_STATE`` on, of a layer that keeps a state."""
    rng = random.Random(f"{seed} {number}")
    of_states = number >= FIRST_STATE
    families, phases = (STATE_FAMILIES, STATE_PHASES) if of_states else (FAMILIES, PHASES)
    family, phase = families[number % len(families)], phases[number % len(phases)]
    draw_layer: Callable[..., LayerConfig] = _state_layer if of_states else _layer
    while True:
        config = draw_layer(rng, family, space.tiny)
        if (batch := draw_batch(rng, phase, config, space)) is not None:
            return work_of(seed, number, family, phase, config, batch)


def draw_batch(rng: random.Random, phase: str, config: LayerConfig, space: Space) -> BatchShape | None:
    """Return a batch of a phase for a layer; None where fifty were too large."""
    for _ in range(50):
        batch = _BATCHES[phase](rng, space, config.max_decode_query_len)
        if _fits(config, batch, space):
            return batch
    return None


def kind_of(config: LayerConfig) -> str:
    """Return one text for all layers that are alike except in what changes no time, to leave kinds out by."""
    fields = timed_fields(config)
    if isinstance(config, AttentionConfig):
        first = f"{config.num_heads}:{config.num_kv_heads} {config.head_size}"
        if config.mla:
            first = f"mla {config.num_heads} " + "+".join(str(fields.pop(name)) for name in MLA_DIMS)
        named = ("num_heads", "num_kv_heads", "head_size")
        return " ".join([first, *[f"{name}={value}" for name, value in fields.items() if name not in named]])
    heads, sizes = f"{config.num_heads}:{config.num_v_heads}", f"{config.head_size}x{config.v_head_size}"
    shown = ("recurrence", "num_heads", "num_v_heads", "head_size", "v_head_size")
    others = [f"{name}={value}" for name, value in fields.items() if name not in shown]
    return " ".join([config.recurrence, heads, sizes, *others])


def _fits(config: LayerConfig, batch: BatchShape, space: Space) -> bool:
    most_tokens = space.tokens
    if isinstance(config, StateConfig):  # each request reads one state, and writes as many as it has tokens in a decode
        num_bytes = batch.num_requests * (1 + config.max_decode_query_len) * bytes_per_slot(config)
    else:
        num_bytes = batch.num_kv_tokens * bytes_per_token(MLA if config.mla else FLASH_ATTN_NHD, config)
        most_tokens //= 4 if config.sparse else 1  # each has its own list of tokens
    if batch.num_requests > space.requests or batch.num_tokens - batch.num_requests > most_tokens:
        return False
    if num_bytes > MOST_CACHE_BYTES:
        return False
    floor = roofline_us(config, batch, lookup("h100"))
    return floor is not None and floor <= MOST_US


def _pick(rng: random.Random, weights: Mapping[int, float]) -> int:
    return rng.choices([*weights], [*weights.values()])[0]


def _layer(rng: random.Random, family: str, tiny: bool) -> AttentionConfig:
    base, _, extra = family.partition(" ")
    more: dict[str, Any] = {}
    if family == "sparse":
        more["kv_cache_dtype"] = rng.choice(("auto", "fp8_e4m3"))
    if base in ("fp8", "drafts"):  # one in three of such layers has a window or sinks, too
        base, extra = rng.choice(("gqa", "gqa", "gqa", "gqa", "window", "sinks")), base
    if extra == "fp8":
        more["kv_cache_dtype"] = "fp8_e4m3"
    elif extra == "drafts":
        more["num_speculative_tokens"] = min(_pick(rng, DRAFTS), 3 if base == "mla" else 7)
    known = [] if tiny else _of_models(base)
    fields: Mapping[str, Any]
    if known and rng.random() < OF_MODELS:
        fields = _on_ranks(rng.choice(known), _pick(rng, RANKS))
    else:
        fields = _made_up(rng, base, tiny)
    return AttentionConfig(**{**fields, **more})


def _state_layer(rng: random.Random, recurrence: RecurrenceName, tiny: bool) -> StateConfig:
    """Return a layer that keeps a state, of a model's sizes on one of some ranks."""
    heads, v_heads, size, v_size = (1, 2, 16, 16) if tiny else rng.choice(STATE_SIZES[recurrence])
    ranks = 1 if tiny else _pick(rng, RANKS)
    while v_heads % ranks:
        ranks //= 2
    heads = max(1, heads // ranks)  # ranks keep copies of the same
    of_tiny = tiny and recurrence == "kda"  # where each value head has its own key head
    return StateConfig(
        recurrence=recurrence,
        num_heads=heads,
        num_v_heads=1 if of_tiny else v_heads // ranks,
        head_size=size,
        v_head_size=v_size,
        state_dtype=rng.choice(STATE_DTYPES),
        conv_kernel_size=0 if recurrence == "lightning" else 4,
        num_speculative_tokens=_pick(rng, DRAFTS) if rng.random() < 0.15 else 0,
    )


def _made_up(rng: random.Random, base: str, tiny: bool) -> dict[str, Any]:
    """Return the fields of a layer that is put together from sizes that models have."""
    if base in ("mla", "sparse"):
        dims = rng.choices([each for each, _ in MLA_SIZES], [weight for _, weight in MLA_SIZES])[0]
        if base == "sparse":
            return {"num_heads": 2 if tiny else _pick(rng, MLA_HEADS), **DEEPSEEK, "sparse_top_k": 64 if tiny else 2048}
        if tiny:
            dims = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
        return {"num_heads": 2 if tiny else _pick(rng, MLA_HEADS), **dims}
    while True:
        kv_heads, group = (rng.choice((1, 2)), 2) if tiny else (_pick(rng, KV_HEADS), _pick(rng, GROUPS))
        if kv_heads * group <= MOST_HEADS:
            break
    size = 32 if tiny else _pick(rng, HEAD_SIZES)
    found: dict[str, Any] = {"num_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_size": size}
    if base == "window":
        found["sliding_window"] = 16 if tiny else _pick(rng, WINDOWS)
    if base == "cap":
        found["logits_soft_cap"] = 50.0
        if rng.random() < 0.5:
            found["sliding_window"] = 16 if tiny else 4096
    if base == "sinks":
        found["sinks"] = True
        if not tiny and rng.random() < 0.7:
            found["head_size"] = 64
        if rng.random() < 0.5:
            found["sliding_window"] = 16 if tiny else 128
    return found


@functools.cache
def _of_models(base: str) -> list[Mapping[str, Any]]:
    """Return the fields of the known models' layers of a family, each kind once."""
    found: dict[str, Mapping[str, Any]] = {}
    for name in presets():
        for kind in configs_from_model(name).kinds:
            config = kind.config
            if isinstance(config, AttentionConfig) and config.attn_type == "decoder" and _base_of(config) == base:
                found.setdefault(kind_of(config), {**timed_fields(config), "dtype": "bfloat16"})
    return [*found.values()]


def _base_of(config: AttentionConfig) -> str | None:
    if config.attention_chunk_size is not None or config.alibi or config.mm_prefix or config.kv_cache_dtype != "auto":
        return None
    if config.mla:
        return "sparse" if config.sparse else "mla"
    if config.sinks or config.logits_soft_cap:
        return "sinks" if config.sinks else "cap"
    return "window" if config.sliding_window else "gqa"


def _on_ranks(fields: Mapping[str, Any], ranks: int) -> Mapping[str, Any]:
    """Return a layer's fields on one of so many ranks, or of half as many, where its heads cannot be shared so."""
    heads, kv_heads = fields["num_heads"], fields.get("num_kv_heads", 1)
    while ranks > 1 and (heads % ranks or (kv_heads % ranks and ranks % kv_heads)):
        ranks //= 2
    here = {**fields, "num_heads": heads // ranks}
    if "num_kv_heads" in fields:
        here["num_kv_heads"] = max(1, kv_heads // ranks)
    try:
        AttentionConfig(**here)
    except AttnSelectError:
        return fields
    return here


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(max(low, high)))))


def _decode(rng: random.Random, space: Space, new: int) -> BatchShape:
    length = max(new, _log_uniform(rng, *space.contexts))
    return BatchShape((RequestGroup(_log_uniform(rng, 1, space.requests), new, length),))


def _uneven(rng: random.Random, space: Space, new: int) -> BatchShape:
    low, high = space.contexts
    short = _log_uniform(rng, low, high // 4)
    long = min(high, _log_uniform(rng, 4 * short, high))
    many = RequestGroup(_log_uniform(rng, 2, space.requests), new, max(new, short))
    return BatchShape((many, RequestGroup(_log_uniform(rng, 1, max(1, many.count // 8)), new, long)))


def _spread(rng: random.Random, space: Space, new: int) -> BatchShape:
    """Draw lengths as a service has them: log-normal, by twelve quantiles at most."""
    low, high = space.contexts
    requests, middle = _log_uniform(rng, 2, space.requests), _log_uniform(rng, low, high // 8)
    sigma, kinds = rng.uniform(0.3, 1.5), min(12, requests)
    counts = [requests // kinds + (index < requests % kinds) for index in range(kinds)]
    places = [NormalDist().inv_cdf((index + 0.5) / kinds) for index in range(kinds)]
    lengths = [min(high, max(new, round(middle * math.exp(sigma * place)))) for place in places]
    return BatchShape(tuple([RequestGroup(n, new, length) for n, length in zip(counts, lengths, strict=True)]))


def _prompts(rng: random.Random, space: Space, new: int, history: bool, most: int) -> BatchShape:
    """Draw prompts, all of one length or each of its own; with ``history`` some of it is cached already."""
    found = []
    equal = rng.random() < 0.5
    count = _log_uniform(rng, 1, most)
    for _ in range(1 if equal else count):
        query = max(new + 1, _log_uniform(rng, *space.prompts))
        cached = _log_uniform(rng, *space.contexts) if history else 0
        found.append(RequestGroup(count if equal else 1, query, max(query, min(query + cached, space.contexts[1]))))
    return BatchShape(tuple(found))


def _mixed(rng: random.Random, space: Space, new: int) -> BatchShape:
    prompts = _prompts(rng, space, new, rng.random() < 0.5, 4)
    decodes = rng.choice((_decode, _uneven, _spread))(rng, space, new)
    return BatchShape((*prompts.groups, *decodes.groups))


_BATCHES: Mapping[str, Callable[[random.Random, Space, int], BatchShape]] = {
    "decode": _decode,
    "uneven": _uneven,
    "spread": _spread,
    "prefill": partial(_prompts, history=False, most=16),
    "chunk": partial(_prompts, history=True, most=8),
    "mixed": _mixed,
}
