"""What one attention layer asks for: ``AttentionConfig``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field

from attn_select.layer import dtypes
from attn_select.layer.checked import (
    MAX,
    DType,
    HeadSize,
    KVCacheDType,
    LayerFields,
    Positive,
    checked_model,
    checked_values,
    refuse,
)
from attn_select.layer.features import FEATURES, MOST_SPECULATIVE_TOKENS

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
AttentionType = Literal["decoder", "encoder", "encoder_only", "encoder_decoder"]
ATTENTION_TYPES: tuple[AttentionType, ...] = get_args(AttentionType)
CudaGraphLevel = Literal["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
CUDA_GRAPH_LEVELS: tuple[CudaGraphLevel, ...] = get_args(CudaGraphLevel)
Sort = Literal["attention", "mla", "sparse_mla", "state"]
"""What a backend is made for: keys and values per head, MLA, sparse MLA, or a state (``attn_select.layer.state``)."""
MLA_DIMS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""The fields that make a layer multi-head latent attention; set together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(LayerFields):
    """One attention layer, per rank. Immutable and hashable.

    Heads count on one tensor-parallel rank; sizes are in elements, ``sliding_window`` and
    ``block_size`` in tokens. With MLA (``kv_lora_rank`` set) ``head_size`` is
    ``kv_lora_rank + qk_rope_head_dim``, the width of the latent cache, and ``num_kv_heads`` is 1, as in
    vLLM; both are filled in when left out. dtypes are strings (``attn_select.layer.dtypes``); torch's own are accepted
    too. Types are strict: a head count is an int, and ``"32"``, ``32.0`` and ``True`` are refused.

    Raises:
        ConfigError: a value is out of range or two fields contradict each other; it names them.
    """

    num_heads: Positive
    """Query heads per rank."""
    num_kv_heads: Positive = 0
    """KV heads per rank; divides ``num_heads``. Left out: ``num_heads``, with MLA 1."""
    head_size: HeadSize = 0
    """Width of one query and key head. Required, except with MLA, where it is the latent width."""
    v_head_size: HeadSize | None = None
    """Width of one value head where it differs from ``head_size``; not with MLA."""
    dtype: DType = "bfloat16"
    """Compute dtype of query and output."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Storage dtype of the KV cache; ``auto`` is ``dtype``."""
    block_size: Positive | None = None
    """Tokens per cache block as the allocator hands them out; None lets the selection choose."""
    attn_type: AttentionType = "decoder"
    """decoder, encoder (of an encoder-decoder model), encoder_only, encoder_decoder (cross-attention)."""
    sliding_window: Positive | None = None
    """Tokens that a query sees, itself included; None is all."""
    attention_chunk_size: Positive | None = None
    """Chunked local attention (Llama 4): a query sees the keys of its own chunk, the ``attention_chunk_size`` tokens
    from a multiple of it on, up to itself; None is all."""
    logits_soft_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """``cap * tanh(scores / cap)`` as in Gemma 2."""
    alibi: bool = False
    """Linear position biases (arXiv 2108.12409)."""
    sinks: bool = False
    """A learned logit per head in the softmax's denominator (gpt-oss)."""
    position_bias: bool = False
    """A bias for each head and distance is added to the scores, learned (T5, arXiv 1910.10683) or computed from the
    query (Inkling); ALiBi is ``alibi``."""
    dual_chunk: bool = False
    """Dual chunk attention (arXiv 2402.17463): rotary positions count within chunks and between them, so that keys are
    rotated by another angle for each query chunk. Requests shorter than a chunk attend as without it."""
    kv_lora_rank: Positive | None = None
    """Width of MLA's compressed KV (arXiv 2405.04434); set together with the next three."""
    qk_nope_head_dim: Positive | None = None
    qk_rope_head_dim: Annotated[int, Field(ge=0, le=MAX)] | None = None
    """0: no rotary part, keys are the latent alone (NoPE)."""
    v_head_dim: Positive | None = None
    sparse_top_k: Positive | None = None
    """Tokens that sparse MLA attends to (DeepSeek Sparse Attention); needs the MLA dims."""
    mm_prefix: bool = False
    """Image tokens attend to each other in both directions inside a causal prompt."""
    non_causal: bool = False
    """Bidirectional attention inside the paged decoder path (diffusion drafters); not the encoder types."""
    batch_invariant: bool = False
    """A request's result must be bitwise the same whatever else is in the batch."""
    per_head_quant_scales: bool = False
    """One FP8 scale per KV head instead of one per tensor."""
    output_quantization: dtypes.OutputQuantization = "none"
    """Quantise the output inside the kernel."""
    decode_context_parallel_size: Positive = 1
    """Ranks that share one request's KV cache in decode (DCP)."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MOST_SPECULATIVE_TOKENS)] = 0
    """Draft tokens per request and step: decode queries are this plus one long."""
    draft_tree: bool = False
    """The draft tokens of a step may form a tree: each sees the context, its ancestors and itself, as the batch's
    ``tree_mask`` says. Windows and biases count positions in the cache."""
    cuda_graph: CudaGraphLevel = "NEVER"
    """The least CUDA-graph level that the engine needs; NEVER asks for none."""

    mla: bool = field(init=False, repr=False, compare=False)
    """Whether this is multi-head latent attention."""
    sparse: bool = field(init=False, repr=False, compare=False)
    """Whether this is sparse MLA."""
    sort: Sort = field(init=False, repr=False, compare=False)
    """``attention``, ``mla`` or ``sparse_mla``."""
    has_cache: bool = field(init=False, repr=False, compare=False)
    """Whether keys and values are kept in a paged cache (not so for encoders)."""
    phases: tuple[Phase, ...] = field(init=False, repr=False, compare=False)
    """The phases that this layer runs: encoders have no decode."""
    cache_dtype: str = field(init=False, repr=False, compare=False)
    """``kv_cache_dtype`` with ``auto`` resolved to ``dtype``."""
    value_head_size: int = field(init=False, repr=False, compare=False)
    """Width of one value head: ``v_head_size`` or ``head_size``."""
    max_decode_query_len: int = field(init=False, repr=False, compare=False)
    """The most queries of one request in a decode: its last token and the draft tokens."""

    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            put = partial(object.__setattr__, self)
            for name, value in checked_values(_Checked, _filled_in(data)).items():
                put(name, value)
            put("mla", self.kv_lora_rank is not None)
            put("sparse", self.sparse_top_k is not None)
            put("sort", "sparse_mla" if self.sparse else "mla" if self.mla else "attention")
            put("has_cache", self.attn_type in ("decoder", "encoder_decoder"))
            put("phases", PHASES if self.has_cache else ("prefill",))
            put("cache_dtype", self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype)
            put("value_head_size", self.v_head_size or self.head_size)
            put("max_decode_query_len", 1 + self.num_speculative_tokens)
            refuse(_contradictions(self))

    @property
    def softmax_scale(self) -> float:
        """The usual factor on ``q . k``: the width of a query's head ** -0.5, with MLA of the decompressed form."""
        width = self.head_size
        if self.qk_nope_head_dim is not None and self.qk_rope_head_dim is not None:
            width = self.qk_nope_head_dim + self.qk_rope_head_dim
        return float(width**-0.5)


# An instance of a pydantic model looks each field up in several places, because its class has a __getattr__: the slots
# of a dataclass are read several times as fast, and a decision reads them some two hundred times.
_Checked = checked_model(AttentionConfig)
AttentionConfig.model_fields = _Checked.model_fields


def _filled_in(data: dict[str, Any]) -> dict[str, Any]:
    """Add the head counts and sizes that follow from others, where those are sound."""
    heads, rank, rope = data.get("num_heads"), data.get("kv_lora_rank"), data.get("qk_rope_head_dim")
    if "num_kv_heads" not in data and isinstance(heads, int) and 1 <= heads <= MAX:
        data["num_kv_heads"] = int(heads) if rank is None else 1
    if "head_size" not in data and isinstance(rank, int) and isinstance(rope, int) and 1 <= rank + rope <= 8192:
        data["head_size"] = rank + rope
    return data


def _contradictions(c: AttentionConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield ``(fields, message)`` for all that cannot be true at once. What kernels lack is for the gate to say."""
    dims = {name: getattr(c, name) for name in MLA_DIMS}
    missing = tuple(name for name, value in dims.items() if value is None)
    if not missing:
        yield from _mla_contradictions(c)
    elif len(missing) < len(dims):
        given = ", ".join(f"{name} = {value}" for name, value in dims.items() if value is not None)
        yield missing, f"{' and '.join(missing)} missing beside {given}: MLA needs all four of {', '.join(dims)}"
    else:
        if not c.head_size:
            yield ("head_size",), "head_size is required (from 1 to 8192; with MLA it follows from the MLA dims)"
        if c.num_heads % c.num_kv_heads:
            text = f"num_kv_heads {c.num_kv_heads} must divide num_heads {c.num_heads} (both are per rank)"
            yield ("num_kv_heads", "num_heads"), text
        if c.sparse_top_k is not None:
            text = f"sparse_top_k = {c.sparse_top_k} is for sparse MLA: it needs {', '.join(dims)}"
            yield ("sparse_top_k", *dims), text
    if c.kv_cache_dtype == "fp8_ds_mla" and c.sparse_top_k is None:
        text = "kv_cache_dtype = 'fp8_ds_mla' is sparse MLA's token format: it needs sparse_top_k"
        yield ("kv_cache_dtype", "sparse_top_k"), text
    if c.attention_chunk_size is not None:
        yield from _chunk_contradictions(c)
    if c.draft_tree and c.num_speculative_tokens == 0:
        text = "draft_tree = True needs num_speculative_tokens from 1, the drafts that the tree is made of"
        yield ("draft_tree", "num_speculative_tokens"), text
    if c.draft_tree and c.non_causal:
        text = "draft_tree = True with non_causal = True: drafts see their ancestors alone (accepted: one of the two)"
        yield ("draft_tree", "non_causal"), text
    if c.draft_tree and c.attn_type == "encoder_decoder":
        text = f"attn_type = {c.attn_type!r} with draft_tree = True: an encoder's tokens are no drafts"
        yield ("draft_tree", "attn_type"), f"{text} (accepted: 'decoder')"
    if not c.has_cache:
        yield from _encoder_contradictions(c)
    if c.per_head_quant_scales and not dtypes.is_quantized(c.kv_cache_dtype):
        text = f"per_head_quant_scales needs a quantised kv_cache_dtype (fp8_e4m3, fp8_e5m2), got {c.kv_cache_dtype!r}"
        yield ("per_head_quant_scales", "kv_cache_dtype"), text


def _mla_contradictions(c: AttentionConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    assert c.kv_lora_rank is not None
    assert c.qk_rope_head_dim is not None
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    if c.head_size != latent:
        text = f"head_size = {c.head_size or latent}: with MLA it is kv_lora_rank + qk_rope_head_dim = {latent}"
        yield ("head_size", "kv_lora_rank", "qk_rope_head_dim"), f"{text} (from 1 to 8192; may be left out)"
    if c.num_kv_heads != 1:
        text = f"num_kv_heads = {c.num_kv_heads}: with MLA it is 1 (may be left out), since all heads share the latent"
        yield ("num_kv_heads",), text
    if c.v_head_size is not None:
        text = f"v_head_size = {c.v_head_size}: with MLA leave it out, v_head_dim = {c.v_head_dim} is the value width"
        yield ("v_head_size",), text
    if c.attn_type != "decoder":
        yield ("attn_type",), f"attn_type = {c.attn_type!r}: with MLA it is 'decoder'"


def _chunk_contradictions(c: AttentionConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    where = f"with attention_chunk_size = {c.attention_chunk_size}"
    if c.mla:
        text = f"kv_lora_rank = {c.kv_lora_rank} {where}: chunks are for layers with keys and values per head"
        yield ("attention_chunk_size", "kv_lora_rank"), f"{text} (accepted: one of the two)"
    if c.attn_type == "encoder_decoder":
        text = f"attn_type = {c.attn_type!r} {where}: chunks are of a decoder's own tokens (accepted: 'decoder')"
        yield ("attention_chunk_size", "attn_type"), text
    for name, off in (("sliding_window", None), ("mm_prefix", False), ("non_causal", False), ("draft_tree", False)):
        if (value := getattr(c, name)) != off:
            text = f"{name} = {value} {where}: a query sees the tokens of its chunk up to itself (accepted: {off})"
            yield ("attention_chunk_size", name), text


def _encoder_contradictions(c: AttentionConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    where = f"with attn_type = {c.attn_type!r}"
    if c.kv_cache_dtype not in ("auto", c.dtype):
        text = f"kv_cache_dtype = {c.kv_cache_dtype!r} {where}: encoders keep no KV cache (accepted: 'auto')"
        yield ("kv_cache_dtype", "attn_type"), text
    for feature in FEATURES:
        if feature.not_in_encoders and (value := getattr(c, feature.field)) != feature.off:
            text = f"{feature.field} = {value} {where}: {feature.not_in_encoders} (accepted: {feature.off})"
            yield (feature.field, "attn_type"), text
