"""Configurations to test a backend with: from inside its declared capabilities, and from just outside them.

Outside means: one field of a configuration from inside has a value that is not declared. Everything is drawn from a
seed. Sizes are small, since kernels fail at edges; ``large_of`` says which configurations get large steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attn_select.backends.spec import BackendSpec, Capabilities
from attn_select.errors import ConfigError
from attn_select.layer.config import ATTENTION_TYPES, MLA_DIMS, AttentionConfig, Phase
from attn_select.layer.dtypes import DTYPES, KV_CACHE_DTYPES, is_quantized
from attn_select.layer.features import FEATURES

Fields = dict[str, Any]
Heads = Sequence[tuple[int, int]]
"""``(num_heads, num_kv_heads)`` to choose from; MLA takes the first of each."""

_SIZES = (1, 7, 16, 32, 40, 64, 80, 96, 112, 128, 192, 256, 512)
_MLA_DIMS = (
    (512, 128, 64, 128),
    (512, 192, 64, 256),
    (512, 192, 0, 128),
    (256, 64, 64, 64),
    (64, 32, 16, 32),
    (40, 24, 8, 16),
    (3, 5, 2, 4),
    (40, 24, 0, 16),
)
"""In the order of ``config.MLA_DIMS``: DeepSeek-V3's first."""
_MLA = dict(zip(MLA_DIMS, _MLA_DIMS[0], strict=True))
_RARE = ("decode_context_parallel_size",)
_DISTANCES = ("sliding_window", "attention_chunk_size", "alibi")
"""No kernel measures the distances of windows, chunks and ALiBi across ranks. Nor are FP4 outputs merged."""
_CODES = {"kv_lora_rank": "head-size", **{feature.field: feature.code for feature in FEATURES}}
"""Reason codes that are not the field's own name."""
_MOST_TRIES = 1000
LARGE_EVERY = 12
"""Of so many configurations two get large steps, since these take long."""
_WIDE: Fields = {"sliding_window": 200, "attention_chunk_size": None, "decode_context_parallel_size": 1}
"""Of one of these: a window that is wider than a tile, and what no layer has with it."""
Large = Literal["keys", "requests"]
"""What a configuration's steps have many of."""


@dataclass(slots=True)
class Case:
    """One configuration to test a backend with."""

    # Its number; with the suite's seed it gives the same configuration again.
    index: int
    config: AttentionConfig
    # The phase whose capabilities it was drawn from.
    phase: Phase
    # The field whose value is not declared; None: all are. Then the code of the reason that the gate must give against
    # it.
    changed: str | None = None
    code: str | None = None


def large_of(index: int) -> Large | None:
    """Return what the steps of a configuration have many of; those of most have neither."""
    # The first of these are drawn from inside.
    return {7: "requests", 10: "keys"}.get(index % LARGE_EVERY)  # type: ignore[return-value]


def config_text(config: AttentionConfig) -> str:
    """Return the Python expression that makes ``config``."""
    given = config.model_dump(exclude_defaults=True)
    return f"AttentionConfig({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def draw_case(spec: BackendSpec, seed: int, index: int, heads: Heads) -> Case:
    """Draw configuration ``index`` of a seed; two of five are from outside, where anything is not declared."""
    rng = random.Random(f"{spec.name} {seed} {index}")
    phase: Phase = rng.choice(list(spec.capabilities))
    capabilities = spec.of_attention(phase)
    config = inside_config(rng, capabilities, heads, phase)
    if index % (2 * LARGE_EVERY) == 22 and capabilities.sliding_window.value and config.attn_type == "decoder":
        config = made_config(own_fields(config) | _WIDE) or config
    if index % 5 in (1, 3):
        changes: dict[tuple[str, str], list[AttentionConfig]] = {}
        for changed, code, fields in _changes(capabilities, config):
            if (outside := made_config(fields)) is not None and phase in outside.phases:
                changes.setdefault((changed, code), []).append(outside)
        if changes:
            question = rng.choice(list(changes))
            return Case(index, rng.choice(changes[question]), phase, *question)
    return Case(index, config, phase)


def with_known_key(spec: BackendSpec, seed: int, case: Case, known: AttentionConfig) -> AttentionConfig:
    """Return ``known`` with every field of the case's configuration that does not change its ``compile_key``."""
    rng = random.Random(f"{spec.name} {seed} {case.index} key")
    compiled, wanted = spec.compile_key(known), own_fields(case.config)
    names = sorted({*own_fields(known), *wanted})
    for name in rng.sample(names, len(names)):
        fields = own_fields(known)
        fields.pop(name, None)
        config = made_config(fields | {name: wanted[name]} if name in wanted else fields)
        if config is not None and spec.compile_key(config) == compiled:
            known = config
    return known


def own_fields(config: AttentionConfig) -> Fields:
    """Return the fields that a configuration was made with, without the fields that MLA fills in."""
    fields = config.model_dump(exclude_defaults=True)
    for name in ("head_size", "num_kv_heads") if config.mla else ():
        fields.pop(name, None)
    return fields


def made_config(fields: Fields) -> AttentionConfig | None:
    try:
        return AttentionConfig(**fields)
    except ConfigError:  # two fields contradict each other
        return None


def _cache_dtypes(capabilities: Capabilities, dtype: str, sparse: bool) -> list[str]:
    """Return the KV-cache dtypes that a layer of compute dtype ``dtype`` may have."""
    listed, mixed = capabilities.kv_cache_dtypes.value, capabilities.mixed_kv_cache_dtype.value
    found = [d for d in listed if d == dtype or mixed or is_quantized(d)]
    found = [d for d in found if d != "fp8_ds_mla" or sparse]
    return [*["auto"] * len(found), *found] if dtype in listed else found


def sizes_of(capabilities: Capabilities) -> list[int]:
    """Return the head sizes to draw from: the declared ones, or those at the ends of a range and some between."""
    sizes = capabilities.head_sizes.value
    ends = {sizes.minimum, sizes.maximum} if sizes.maximum <= 1024 else {sizes.minimum}
    return list(sizes.values) or sorted(size for size in {*_SIZES, *ends} if sizes.accepts(size))


def inside_config(rng: random.Random, capabilities: Capabilities, heads: Heads, phase: Phase) -> AttentionConfig:
    """Draw a configuration that has this phase and declared values only."""
    for _ in range(_MOST_TRIES):
        config = made_config(_inside_fields(rng, capabilities, heads))
        if config is not None and phase in config.phases:
            return config
    raise ValueError(f"the declared capabilities gave no valid configuration with {phase} in {_MOST_TRIES} tries")


def _inside_fields(rng: random.Random, capabilities: Capabilities, heads: Heads) -> Fields:
    """Draw fields of declared values; together they may contradict each other."""
    num_heads, num_kv_heads = rng.choice(heads)
    fields: Fields = {"num_heads": num_heads, "dtype": rng.choice(capabilities.dtypes.value)}
    if capabilities.mla:
        dims = [d for d in _MLA_DIMS if capabilities.head_sizes.value.accepts(d[0] + d[2])]
        fields |= zip(MLA_DIMS, rng.choice(dims or _MLA_DIMS), strict=True)
        if capabilities.sparse:
            fields["sparse_top_k"] = rng.choice((64, 128))
    else:
        sizes = sizes_of(capabilities)
        fields |= {"num_kv_heads": num_kv_heads, "head_size": rng.choice(sizes)}
        if capabilities.v_head_size_differs.value and rng.random() < 0.2:
            fields["v_head_size"] = rng.choice(sizes)
        if rng.random() < 0.3:
            fields["attn_type"] = rng.choice(capabilities.attn_types.value)
    encoder = fields.get("attn_type") in ("encoder", "encoder_only")
    if not encoder and (stored := _cache_dtypes(capabilities, fields["dtype"], capabilities.sparse)):
        fields["kv_cache_dtype"] = rng.choice(stored)
    if rng.random() < 0.6:
        fields["block_size"] = rng.choice(capabilities.block_sizes.value or (16,)) * rng.choice((1, 2, 3))
    for feature in FEATURES:
        declared = getattr(capabilities, feature.fact).value
        accepted = [value for value in feature.examples if feature.accepts(declared, value)]
        likely = 0.05 if feature.field in _RARE else 0.2
        if accepted and rng.random() < likely and not (encoder and feature.not_in_encoders):
            fields[feature.field] = rng.choice(accepted)
    if fields.get("decode_context_parallel_size"):
        fields = {name: value for name, value in fields.items() if name not in _DISTANCES and value != "fp4"}
        if capabilities.mla:
            fields.pop("draft_tree", None)
    if "num_speculative_tokens" not in fields:
        fields.pop("draft_tree", None)
    if not is_quantized(fields.get("kv_cache_dtype", "auto")):
        fields.pop("per_head_quant_scales", None)
    return fields


def _changes(capabilities: Capabilities, config: AttentionConfig) -> Iterator[tuple[str, str, Fields]]:
    """Yield ``(field, code of the reason, fields)`` for every change to a value that is not declared."""
    base = own_fields(config)
    plain: Fields = {"num_heads": config.num_heads, "dtype": config.dtype}
    if not capabilities.mla:
        yield "kv_lora_rank", "mla-unsupported", {**plain, **_MLA}
    elif not capabilities.sparse:
        yield "kv_lora_rank", "mla-only", {**plain, "head_size": 128}
        yield "sparse_top_k", "sparse-unsupported", {**base, "sparse_top_k": 64}
    else:
        yield "sparse_top_k", "sparse-only", {**plain, **_MLA}
    for name, value in _undeclared(capabilities, config):
        if name == "head_size" and config.kv_lora_rank is not None:  # there it is the latent's width
            name, value = "kv_lora_rank", value - config.head_size + config.kv_lora_rank
        yield name, _CODES.get(name, name.replace("_", "-")), {**base, name: value}


def _undeclared(capabilities: Capabilities, config: AttentionConfig) -> Iterator[tuple[str, Any]]:
    """Yield fields with values near the configuration's own that the capabilities do not declare."""
    size = config.head_size
    for other in (size - 1, size + 1, size - 8, size + 8, size + 16, 2 * size):
        if 1 <= other <= 8192 and not capabilities.head_sizes.value.accepts(other):
            yield "head_size", other
    yield from (("dtype", dtype) for dtype in DTYPES if dtype not in capabilities.dtypes.value)
    yield from (("attn_type", name) for name in ATTENTION_TYPES if name not in capabilities.attn_types.value)
    if capabilities.reads_cache and config.has_cache:
        taken = _cache_dtypes(capabilities, config.dtype, config.sparse)
        yield from (("kv_cache_dtype", dtype) for dtype in KV_CACHE_DTYPES if dtype not in taken)
        kernels = capabilities.block_sizes.value
        around = {other for kernel in kernels for other in (1, kernel // 2, kernel - 1, kernel + 1, 3 * kernel // 2)}
        for other in sorted(around):
            if other > 0 and all(other % kernel for kernel in kernels):
                yield "block_size", other
    if not capabilities.v_head_size_differs.value:
        yield from (("v_head_size", other) for other in (size + 8, max(1, size // 2)) if other != size)
    for feature in FEATURES:
        declared = getattr(capabilities, feature.fact).value
        beyond = (declared + 1,) if feature.most is not None and declared < feature.most else ()
        for value in (*feature.examples, *beyond):
            if not feature.accepts(declared, value):
                yield feature.field, value
