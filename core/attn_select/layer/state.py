"""What one layer asks for that keeps a state of fixed size instead of keys and values: ``StateConfig``.

All recurrences here are one: with a state ``S`` of ``(head_size, v_head_size)`` per value head, every token does

- ``S = exp(g) * S``, with the log-decay ``g <= 0``, one number per value head or one per key channel,
- ``S = S + k (beta * (v - S^T k))^T`` by the delta rule, or ``S = S + k (beta * v)^T`` without it,
- ``o = scale * S^T q``.

A query and key head serves ``num_v_heads // num_heads`` value heads that follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from attn_select.layer.checked import DType, HeadSize, LayerFields, Positive, checked_model, checked_values, refuse
from attn_select.layer.config import PHASES, CudaGraphLevel, Phase, Sort
from attn_select.layer.features import MOST_SPECULATIVE_TOKENS

NORM_EPSILON = 1e-6
"""Under the root where queries and keys are normalised (fla-core 0.6.0 fla/ops/gated_delta_rule/fused_recurrent.py)."""
RecurrenceName = Literal["gated_delta_net", "kda", "mamba2", "lightning"]
RECURRENCES: tuple[RecurrenceName, ...] = get_args(RecurrenceName)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How one recurrence fills in the formula of this module.

    Attributes:
        delta_rule: whether a token writes what its key does not give yet, and not its whole value.
        decay: how many log-decays a value head has per token: ``head``: one; ``channel``: one per key channel.
        writes: whether tokens have a write strength ``beta`` of their own; else it is 1.
        normalized: whether queries and keys are normalised to length 1 first (``x / sqrt(sum(x^2) + NORM_EPSILON)``).
        scaled: whether ``scale`` is ``head_size ** -0.5``; else it is 1.
        channels: the order of queries, keys and values side by side, as the convolution of checkpoints has it.
        source: the paper.
    """

    delta_rule: bool
    decay: Literal["head", "channel"]
    writes: bool
    normalized: bool
    scaled: bool
    channels: tuple[str, str, str]
    source: str


_QKV = ("query", "key", "value")
_XBC = ("value", "key", "query")
OF_RECURRENCE: Mapping[RecurrenceName, Recurrence] = {
    "gated_delta_net": Recurrence(True, "head", True, True, True, _QKV, "Gated Delta Networks, arXiv 2412.06464"),
    "kda": Recurrence(True, "channel", True, True, True, _QKV, "Kimi Linear, arXiv 2510.26692"),
    # q is C, k is B, v is x; beta is the step dt, and g is dt * A.
    "mamba2": Recurrence(False, "head", True, False, False, _XBC, "Mamba-2, arXiv 2405.21060"),
    "lightning": Recurrence(False, "head", False, False, False, _QKV, "Lightning Attention-2, arXiv 2401.04658"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig(LayerFields):
    """One layer that keeps a state, per rank. Immutable and hashable.

    Heads count on one tensor-parallel rank, sizes are in elements. dtypes are strings
    (``attn_select.layer.dtypes``); torch's own are accepted too.

    Raises:
        ConfigError: a value is out of range or two fields contradict each other; it names them.
    """

    sort: ClassVar[Sort] = "state"
    """``AttentionConfig.sort``."""
    has_cache: ClassVar[bool] = True
    phases: ClassVar[tuple[Phase, ...]] = PHASES
    block_size: ClassVar[None] = None
    """A state has one slot per request, and no blocks."""

    recurrence: RecurrenceName
    num_heads: Positive
    """Query and key heads per rank (Mamba-2: groups of B and C)."""
    num_v_heads: Positive = 0
    """Value heads per rank, each with its state; a multiple of ``num_heads``. Left out: ``num_heads``."""
    head_size: HeadSize
    """Width of one query and key head (Mamba-2: the state size)."""
    v_head_size: HeadSize = 0
    """Width of one value head. Left out: ``head_size``."""
    dtype: DType = "bfloat16"
    """Compute dtype of query, key, value and output."""
    state_dtype: DType = "float32"
    """Storage dtype of the state."""
    conv_kernel_size: Annotated[int, Field(ge=0, le=64)] = 0
    """Tokens that the causal convolution before the recurrence sees, a token itself included; 0: there is none."""
    chunk_size: Annotated[int, Field(ge=1, le=4096)] = 64
    """Tokens that a prefill computes at once."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MOST_SPECULATIVE_TOKENS)] = 0
    """Draft tokens per request and step: a decode keeps the state behind each of them."""
    cuda_graph: CudaGraphLevel = "NEVER"
    """The least CUDA-graph level that the engine needs; NEVER asks for none."""

    max_decode_query_len: int = field(init=False, repr=False, compare=False)
    """The most tokens of one request in a decode: its last token and the draft tokens."""
    conv_dim: int = field(init=False, repr=False, compare=False)
    """Channels of the convolution: queries, keys and values side by side; 0 without one."""

    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            put = partial(object.__setattr__, self)
            for name, value in checked_values(_Checked, _filled_in(data)).items():
                put(name, value)
            refuse(_contradictions(self))
            put("max_decode_query_len", 1 + self.num_speculative_tokens)
            put("conv_dim", self.width if self.conv_kernel_size else 0)

    @property
    def width(self) -> int:
        """Queries, keys and values of one token, of all heads, side by side."""
        return 2 * self.num_heads * self.head_size + self.num_v_heads * self.v_head_size

    @property
    def scale(self) -> float:
        """The factor on the query."""
        return self.head_size**-0.5 if self.rule.scaled else 1.0

    @property
    def rule(self) -> Recurrence:
        """How the recurrence computes."""
        return OF_RECURRENCE[self.recurrence]


_Checked = checked_model(StateConfig)
StateConfig.model_fields = _Checked.model_fields


def _filled_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """Add the value heads and their width where they are left out."""
    follows = {"num_v_heads": data.get("num_heads"), "v_head_size": data.get("head_size")}
    sound = {name: value for name, value in follows.items() if type(value) is int and 1 <= value <= 8192}
    return {**sound, **data}


def _contradictions(c: StateConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    if c.num_v_heads % c.num_heads:
        text = f"num_heads {c.num_heads} must divide num_v_heads {c.num_v_heads} (both are per rank)"
        yield ("num_v_heads", "num_heads"), text
    if c.recurrence == "kda" and c.num_v_heads != c.num_heads:
        text = f"num_v_heads = {c.num_v_heads} with recurrence = 'kda': it has one value head per key head"
        yield ("num_v_heads", "recurrence"), f"{text} (accepted: {c.num_heads})"
    if c.conv_kernel_size == 1:
        text = "conv_kernel_size = 1: a convolution sees tokens before its own (accepted: 0, or from 2 to 64)"
        yield ("conv_kernel_size",), text
