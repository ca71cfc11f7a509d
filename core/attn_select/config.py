"""What one attention layer asks for: ``AttentionConfig``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from attn_select import dtypes
from attn_select.errors import ConfigError, UnknownNameError, shorten

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
AttentionType = Literal["decoder", "encoder", "encoder_only", "encoder_decoder"]
CudaGraphLevel = Literal["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
CUDA_GRAPH_LEVELS: tuple[CudaGraphLevel, ...] = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")


def _canonical(value: object) -> object:
    return dtypes.canonical(value) if isinstance(value, str) else value


Positive = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
DType = Annotated[Literal["bfloat16", "float16", "float32"], BeforeValidator(_canonical)]
KVCacheDType = Annotated[
    Literal["auto", "bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4"],
    BeforeValidator(_canonical),
]


class AttentionConfig(BaseModel):
    """One attention layer, per rank. Immutable and hashable.

    Heads are those of one tensor-parallel rank; sizes are in elements, ``sliding_window`` and
    ``block_size`` in tokens. With MLA (``kv_lora_rank`` set) ``head_size`` is
    ``kv_lora_rank + qk_rope_head_dim``, the width of the latent cache, and ``num_kv_heads`` is 1, as in
    vLLM; both are filled in when left out. dtypes are strings (``attn_select.dtypes``).

    Raises:
        ConfigError: a value is out of range or two fields contradict each other; it names them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    num_heads: Positive
    """Query heads per rank."""
    num_kv_heads: Positive
    """KV heads per rank; divides ``num_heads``. Left out: ``num_heads``, with MLA 1."""
    head_size: Annotated[int, Field(ge=1, le=8192, strict=True)]
    """Width of one query and key head; with MLA the latent width."""
    v_head_size: Annotated[int, Field(ge=1, le=8192, strict=True)] | None = None
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
    logits_soft_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """``cap * tanh(scores / cap)`` as in Gemma 2."""
    alibi: bool = False
    """Linear position biases (arXiv 2108.12409)."""
    sinks: bool = False
    """A learned logit per head in the softmax's denominator (gpt-oss)."""
    kv_lora_rank: Positive | None = None
    """Width of MLA's compressed KV (arXiv 2405.04434); set together with the next three."""
    qk_nope_head_dim: Positive | None = None
    qk_rope_head_dim: Positive | None = None
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
    output_quantization: Literal["none", "fp8", "fp4"] = "none"
    """Quantise the output inside the kernel."""
    decode_context_parallel_size: Positive = 1
    """Ranks that share one request's KV cache in decode (DCP)."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=1024, strict=True)] = 0
    """Draft tokens per request and step: decode queries are this plus one long."""
    cuda_graph: CudaGraphLevel = "NEVER"
    """The least CUDA-graph level that the engine needs; NEVER asks for none."""

    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise _config_error(error, set(type(self).model_fields)) from None

    @property
    def mla(self) -> bool:
        """Whether this is multi-head latent attention."""
        return self.kv_lora_rank is not None

    @property
    def sparse(self) -> bool:
        """Whether this is sparse MLA."""
        return self.sparse_top_k is not None

    @property
    def has_cache(self) -> bool:
        """Whether keys and values are kept in a paged cache (not so for encoders)."""
        return self.attn_type in ("decoder", "encoder_decoder")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that this layer runs: encoders have no decode."""
        return PHASES if self.has_cache else ("prefill",)

    @property
    def cache_dtype(self) -> str:
        """``kv_cache_dtype`` with ``auto`` resolved to ``dtype``."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def value_head_size(self) -> int:
        """Width of one value head: ``v_head_size`` or ``head_size``."""
        return self.v_head_size or self.head_size

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if isinstance(data, dict):
            rank, rope = data.get("kv_lora_rank"), data.get("qk_rope_head_dim")
            if isinstance(rank, int) and isinstance(rope, int):
                data.setdefault("head_size", rank + rope)
            data.setdefault("num_kv_heads", data.get("num_heads") if rank is None else 1)
        return data

    @model_validator(mode="after")
    def _check(self) -> AttentionConfig:
        mla_dims = (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        if any(d is not None for d in mla_dims):
            if self.kv_lora_rank is None or self.qk_rope_head_dim is None or None in mla_dims:
                raise ValueError(
                    "MLA needs all four of kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim; "
                    f"got {mla_dims}"
                )
            latent = self.kv_lora_rank + self.qk_rope_head_dim
            if self.head_size != latent:
                raise ValueError(
                    f"head_size {self.head_size} with MLA must be kv_lora_rank + qk_rope_head_dim = {latent} "
                    "(leave it out to have it filled in)"
                )
            if self.num_kv_heads != 1:
                raise ValueError(f"num_kv_heads {self.num_kv_heads} with MLA must be 1: all heads share the latent")
            if self.v_head_size is not None:
                raise ValueError("v_head_size does not go with MLA: use v_head_dim")
            if self.attn_type != "decoder":
                raise ValueError(f"attn_type {self.attn_type!r} with MLA must be 'decoder'")
        elif self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads} "
                "(both are per tensor-parallel rank)"
            )
        if self.sparse_top_k is not None and self.kv_lora_rank is None:
            raise ValueError("sparse_top_k needs the MLA dims (kv_lora_rank and its three companions)")
        if self.kv_cache_dtype == "fp8_ds_mla" and self.sparse_top_k is None:
            raise ValueError("kv_cache_dtype 'fp8_ds_mla' is the format of sparse MLA: it needs sparse_top_k")
        if not self.has_cache:
            if self.kv_cache_dtype not in ("auto", self.dtype):
                raise ValueError(f"kv_cache_dtype {self.kv_cache_dtype!r} with attn_type {self.attn_type!r}: no KV cache")
            for field in ("non_causal", "mm_prefix", "num_speculative_tokens"):
                if getattr(self, field):
                    raise ValueError(f"{field} with attn_type {self.attn_type!r}: only decoder layers take it")
            if self.decode_context_parallel_size > 1:
                raise ValueError(f"decode_context_parallel_size with attn_type {self.attn_type!r}: there is no decode")
        if self.per_head_quant_scales and not dtypes.is_quantized(self.kv_cache_dtype):
            raise ValueError(f"per_head_quant_scales needs an FP8 kv_cache_dtype, got {self.kv_cache_dtype!r}")
        return self


def _config_error(error: ValidationError, fields: set[str]) -> ConfigError:
    """Turn pydantic's errors into one ``ConfigError`` that names field, value and what is accepted."""
    parts: list[str] = []
    named: list[str] = []
    hint = None
    for item in error.errors(include_url=False):
        field = str(item["loc"][0]) if item["loc"] else ""
        if item["type"] == "extra_forbidden":
            unknown = UnknownNameError("field", field, sorted(fields))
            parts.append(unknown.message)
            hint = unknown.hint
        elif item["type"] == "missing":
            parts.append(f"{field} is required")
        elif not field:
            parts.append(item["msg"].removeprefix("Value error, "))
            field = parts[-1].split(" ", 1)[0]
        else:
            accepted = item["msg"][:1].lower() + item["msg"][1:]
            parts.append(f"{field} = {shorten(repr(item['input']))}: {accepted}")
        named.append(field)
    return ConfigError("; ".join(parts), fields=named, hint=hint)
