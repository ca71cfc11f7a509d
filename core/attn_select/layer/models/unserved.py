"""Kinds of sparse attention that no backend here has a kernel for, with what a model's config says of each.

They are no ``AttentionConfig``: what a query attends to is chosen in blocks, or out of compressed keys. An engine may
serve them by kernels of its own (``attn_select.engines``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attn_select.errors import ConfigError
from attn_select.layer import dtypes
from attn_select.layer.models.fields import Fields
from attn_select.layer.models.kv_sharing import CacheOwners
from attn_select.layer.models.layer_kind import Layer, Sparse
from attn_select.layer.models.shares import divides


@dataclass(slots=True)
class UnservedLayers:
    """Layers of a kind of attention that no backend here has a kernel for, per tensor-parallel rank."""

    kind: str
    layers: tuple[int, ...]  # their places in the model, from 0
    owners: CacheOwners  # which of them own what they cache
    attends_to: str  # what a query attends to, in words
    num_heads: int | None  # as in ``AttentionConfig``
    num_kv_heads: int | None
    head_size: int | None
    tokens: int | None  # the most tokens of the context that a query attends to, its window and its own block aside
    block_size: int | None  # tokens that are chosen, or kept as one key, together
    window: int | None  # tokens that a query sees in any case, itself included
    indexer_heads: int | None  # of the indexer that chooses for each query
    indexer_head_size: int | None
    dtype: str  # what they compute in, and how keys and values are stored
    cache_dtype: str
    # of keys and values per token of context and layer; None where nothing grows with the context
    bytes_per_token: float | None
    indexer_bytes_per_token: float  # of the indexer's keys per token of context and layer, in the compute dtype
    source: str  # where what is known of the kind was read

    @property
    def count(self) -> int:
        """Layers of this kind."""
        return len(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; ``docs/json.md`` documents the fields."""
        owners = self.owners
        data = asdict(self)
        del data["layers"], data["owners"]
        return {
            "kind": data.pop("kind"),
            "count": self.count,
            "cache_count": owners.caches if self.bytes_per_token is not None else 0,
            "indexer_count": owners.indexers if self.indexer_heads is not None else 0,
            "kv_sources": {str(layer): source for layer, source in owners.kv_sources.items()},
            **data,
        }


def unserved_layers(
    sparse: Sparse, layers: Sequence[int], owners: CacheOwners, ranks: int, dtype: str, cache_dtype: str
) -> UnservedLayers:
    """Return what one rank of ``ranks`` has of layers of a kind."""
    heads, kv_heads = sparse.num_heads, sparse.num_kv_heads
    if heads is not None and not divides(ranks, heads, kv_heads):
        text = f"tensor_parallel_size = {ranks} does not divide the {heads} heads of its {sparse.kind} layers"
        raise ConfigError(text, fields=["tensor_parallel_size", "num_heads"])
    stored = dtype if cache_dtype == "auto" else cache_dtype
    width = dtypes.BITS.get(stored, dtypes.BITS[dtype]) / 8
    data = sparse._asdict()
    elements, indexer_elements = data.pop("cache_elements"), data.pop("indexer_elements")
    data["num_heads"] = None if heads is None else heads // ranks
    data["num_kv_heads"] = own_kv_heads = None if kv_heads is None else max(1, kv_heads // ranks)
    known = elements is not None and own_kv_heads is not None
    return UnservedLayers(
        **data,
        layers=tuple(layers),
        owners=owners,
        dtype=dtype,
        cache_dtype=stored,
        bytes_per_token=own_kv_heads * elements * width if known else None,
        indexer_bytes_per_token=indexer_elements * dtypes.BITS[dtype] / 8,
    )


def sparse_kind(fields: Fields, kind: str, base: Layer) -> Sparse:
    """Return what the config says of layers of an unserved kind; ``base`` is what all layers have in common."""
    sparse = _READERS.get(kind, _other)(fields, kind)
    kv_heads = sparse.num_kv_heads or base.num_kv_heads
    return sparse._replace(num_heads=base.num_heads, num_kv_heads=kv_heads, head_size=base.head_size)


WORDS: Mapping[str, str] = {
    "compressed_sparse_attention": "keys of 4 tokens each, which an indexer chooses, beside a window",
    "heavily_compressed_attention": "keys of 128 tokens each, beside a window",
    "reference_sliding_attention": "a window, and all tokens of images and of the prompt",
    "indexed_attention": "the tokens that an indexer chooses, with keys and values per head",
}
"""Kinds of which nothing more is known than what a query attends to (transformers 5.24.0, the modules of models that
have them)."""


def _other(fields: Fields, kind: str) -> Sparse:
    return Sparse(kind, WORDS[kind], source="transformers 5.24.0, configuration_utils.py ALLOWED_ATTN_LAYER_TYPES")


def _qsa(fields: Fields, kind: str) -> Sparse:
    """Qwen Sparse Attention: means of blocks of keys are scored, and whole blocks chosen within a budget of tokens."""
    block, width = fields.integer("indexer_compress_ratio"), fields.size("indexer_head_dim")
    size = fields.size("head_dim")
    return Sparse(
        kind,
        "blocks of tokens that an indexer chooses, and the unfinished block at the end",
        source="transformers 5.24.0 Qwen4ExpTextConfig and modeling_qwen4_exp.py; vLLM 0.33.0 models/qwen4_exp",
        tokens=fields.integer("indexer_budget"),
        block_size=block,
        indexer_heads=fields.heads("indexer_n_heads"),
        indexer_head_size=width,
        cache_elements=2 * size if size else None,
        indexer_elements=width / block if width and block else 0,
    )


def _msa(fields: Fields, kind: str) -> Sparse:
    """MiniMax Sparse Attention: the best blocks of each of an indexer's heads, the newest among them."""
    block = fields.integer("index_block_size")
    blocks = fields.integer("index_topk_blocks")
    width, size = fields.size("index_head_dim"), fields.size("head_dim")
    return Sparse(
        kind,
        "blocks of tokens that an indexer chooses, the query's own among them",
        source="transformers 5.24.0 MiniMaxM3VLTextConfig; vLLM 0.33.0 models/minimax_m3",
        tokens=blocks * block if blocks and block else None,
        block_size=block,
        indexer_heads=fields.heads("index_n_heads"),
        indexer_head_size=width,
        cache_elements=2 * size if size else None,
        indexer_elements=width or 0,
    )


_V4 = "transformers 5.24.0 DeepseekV4Config; vLLM 0.33.0 models/deepseek_v4/attention.py: 584 bytes a key in fp8_ds_mla"
_V41 = "vLLM 0.33.0 models/deepseek_v41/attention.py"


def _v4_window(fields: Fields, kind: str) -> Sparse:
    where = _V41 if "v41" in kind else _V4
    return Sparse(kind, "a window, with a sink", source=where, num_kv_heads=1, window=fields.tokens("sliding_window"))


def _rate(fields: Fields, chosen: bool) -> int:
    """Return the tokens of a key of V4's compressed sparse attention, or of its heavily compressed one."""
    name, own, default = "heavily_compressed_attention", "compress_rate_hca", 128
    if chosen:
        name, own, default = "compressed_sparse_attention", "compress_rate_csa", 4
    rates = fields.get("compress_rates")
    found = rates.get(name) if isinstance(rates, dict) else None
    found = fields.get(own) if found is None else found
    found = default if found is None else found  # DeepseekV4Config.default_compress_rates
    if type(found) is not int or not 1 <= found <= 65536:
        raise fields.wrong(f"compress_rates.{name}", found, "an integer from 1 to 65536")
    return found


def _compressed(fields: Fields, kind: str) -> Sparse:
    """DeepSeek-V4's attention to keys of a few tokens each, one vector for key and value: an indexer chooses (CSA, and
    V4.1's, whose names end in the number of tokens), or all are attended to (HCA)."""
    v41, chosen = kind.startswith("deepseek_v41"), not kind.endswith("hca")
    rate = int(kind[-1]) if v41 else _rate(fields, chosen)
    size, top_k, width = fields.size("head_dim"), fields.tokens("index_topk"), fields.size("index_head_dim")
    what = "keys of single tokens" if rate == 1 else f"keys of {rate} tokens each"
    which = f"{what}, which an indexer chooses" if chosen else f"all {what}"
    return Sparse(
        "deepseek_v41_sparse" if v41 else kind,
        f"{which}, beside a window, with a sink",
        source=_V41 if v41 else _V4,
        num_kv_heads=1,
        tokens=top_k * rate if chosen and top_k else None,
        block_size=rate,
        window=fields.tokens("sliding_window"),
        indexer_heads=fields.heads("index_n_heads") if chosen else None,
        indexer_head_size=width if chosen else None,
        cache_elements=size / rate if size else None,
        indexer_elements=width / rate if chosen and width else 0,
    )


_READERS: Mapping[str, Callable[[Fields, str], Sparse]] = {
    "qsa": _qsa,
    "msa": _msa,
    "deepseek_v4_window": _v4_window,
    "deepseek_v4_csa": _compressed,
    "deepseek_v4_hca": _compressed,
    "deepseek_v41_window": _v4_window,
    "deepseek_v41_sparse_1": _compressed,
    "deepseek_v41_sparse_2": _compressed,
}
KINDS = frozenset((*_READERS, *WORDS))
"""The layer types that ``sparse_kind`` describes."""
