"""Configurations, devices and environments for hypothesis: whatever can be asked of a backend.

@given(config=configs(), where=capabilities())
def test_every_config_is_answered(config, where):
    check_answers(ACME_ATTN, config, where)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from attn_select.backends.spec import Library
from attn_select.errors import ConfigError
from attn_select.layer.config import ATTENTION_TYPES, CUDA_GRAPH_LEVELS, MLA_DIMS, AttentionConfig
from attn_select.layer.dtypes import DTYPES, KV_CACHE_DTYPES
from attn_select.layer.features import FEATURES, Feature
from attn_select.machine.device import known_gpus
from attn_select.machine.environment import Environment
from attn_select.testing.toolkit import MLA_FIELDS, environment_of

HEADS = (1, 2, 5, 7, 8, 16, 32, 64, 71, 96, 128, 160, 256, 1024)
SIZES = (1, 2, 3, 5, 8, 15, 16, 20, 24, 32, 40, 48, 64, 96, 100, 120, 128, 192, 256, 264, 448, 512, 576, 1024, 2048)
"""Head sizes, block sizes, windows and widths: what kernels take, and what lies beside it."""
MOST = 6
"""Optional fields of a configuration, and requests of a step."""


def values_of(feature: Feature) -> st.SearchStrategy[Any]:
    """Draw what a layer may ask of a feature: the table's examples, and other sizes where it is a number of things."""
    examples = st.sampled_from(feature.examples)
    if type(feature.examples[0]) is not int:
        return examples
    return examples | st.sampled_from([size for size in SIZES if feature.most is None or size <= feature.most])


@st.composite
def configs(
    draw: st.DrawFn, /, *, mla: bool | None = None, sparse: bool | None = None, **fields: Any
) -> AttentionConfig:
    """Draw any valid configuration, most fields at their default.

    Args:
        mla: with or without multi-head latent attention; None: either.
        sparse: with or without sparse attention; None: either.
        fields: strategies, or fixed values, for fields by name; None leaves a field at its default.
    """
    heads = draw(st.sampled_from(HEADS))
    sizes = st.sampled_from(SIZES)
    chosen: dict[str, Any] = {"num_heads": heads}
    some: dict[str, Any] = {
        **{feature.field: values_of(feature) for feature in FEATURES},
        "dtype": st.sampled_from(DTYPES),
        "kv_cache_dtype": st.sampled_from(KV_CACHE_DTYPES),
        "block_size": sizes,
        "cuda_graph": st.sampled_from(CUDA_GRAPH_LEVELS),
    }
    if draw(st.booleans()) if mla is None else mla:
        chosen |= {name: draw(st.just(MLA_FIELDS[name]) | sizes) for name in MLA_DIMS}
        if draw(st.booleans()) if sparse is None else sparse:
            chosen["sparse_top_k"] = draw(sizes)
    else:
        chosen |= {"head_size": draw(sizes), "num_kv_heads": draw(st.sampled_from([1, heads, max(1, heads // 4)]))}
        some |= {"v_head_size": sizes, "attn_type": st.sampled_from(ATTENTION_TYPES)}
    for name, given in fields.items():
        some.pop(name, None)
        if given is not None:
            chosen[name] = draw(given) if isinstance(given, st.SearchStrategy) else given
    for name in draw(st.lists(st.sampled_from(sorted(some)), unique=True, max_size=MOST)):
        chosen[name] = draw(some[name])
    try:
        return AttentionConfig(**chosen)
    except ConfigError:  # two fields contradict each other
        reject()


@st.composite
def step_lens(draw: st.DrawFn, /, *, longest_decode: int = 1) -> tuple[list[int], list[int]]:
    """Draw query and sequence lengths of a step's requests, decodes first; any request may have no query token.

    Args:
        longest_decode: queries up to this many tokens are decodes.
    """
    decode = st.integers(0, longest_decode)
    decodes = draw(st.lists(st.just(0) | decode, max_size=MOST))
    prefills = draw(st.lists(st.integers(longest_decode + 1, 40), min_size=not decodes, max_size=MOST - len(decodes)))
    queries = [*decodes, *prefills]
    return queries, [draw(st.integers(query, 1000)) for query in queries]


def capabilities() -> st.SearchStrategy[tuple[int, int] | None]:
    """Draw a compute capability: a known GPU's, one older or newer than all of them, or None for a CPU."""
    known = sorted({gpu.compute_capability for gpu in known_gpus().values() if gpu.compute_capability is not None})
    return st.sampled_from([None, (5, 0), (7, 0), (10, 1), (11, 0), (13, 0), *known])


def environments(
    libraries: Sequence[Library] = (), versions: Mapping[str, Sequence[str]] | None = None
) -> st.SearchStrategy[Environment]:
    """Draw an environment in which some of ``libraries`` are missing and versions are pinned or unknown.

    Args:
        libraries: the ones that may be missing.
        versions: versions to pin, by distribution.
    """
    pins = st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in (versions or {}).items()})
    missing = st.sets(st.sampled_from(list(libraries))) if libraries else st.just(set[Library]())
    return st.builds(lambda pins, missing: environment_of(pins=pins, missing=missing), pins, missing)
