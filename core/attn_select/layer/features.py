"""The features that a layer may ask for, one row each.

The gate, the command line, the reader of models, the renderer, the lint of rules, the conformance suite and the test
strategies all read this table. A new yes-or-no feature is

- one row here,
- one field of ``AttentionConfig``: ``name: bool = False``,
- one fact of ``Capabilities``: ``name: Fact[bool] = Fact(False, "default")``,
- and what backends do with it: a backend that has it declares the fact and honours the field when it runs.

Heads, sizes, dtypes, the kind of attention and the CUDA-graph level are not here: every layer has them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from attn_select.layer.dtypes import OUTPUT_QUANTIZATIONS

PER_HEAD = {"alibi_slopes": "alibi", "sinks": "sinks"}
"""The tensors of one number per query head that a layer brings, and the field that asks for each."""

MOST_SPECULATIVE_TOKENS = 1024
"""The most draft tokens per request and step that a layer may ask for."""


@dataclass(slots=True, eq=False)
class Feature:
    """One feature: how it is asked for, who has it, and how it is called.

    Attributes:
        field: field of ``AttentionConfig``.
        what: its name in the reason against a backend that lacks it: ``no attention sinks``.
        help: help text of its command-line flag.
        flag: the flag, where it is not the field's own name.
        metavar: what the help calls the flag's value.
        fact: field of ``Capabilities`` that says who has it, where it is not the field's own name. The fact is a bool,
            the accepted names, or the greatest accepted number.
        code: code of the reason, where it is not the field's own name.
        off: the field's value where the feature is not asked for.
        says: how the description of a layer names it; ``{}`` stands for the value.
        examples: values to draw in tests; small, because tests run them.
        most: the greatest value of the field; None: no limit that the table knows.
        belongs_to: ``cache`` where it means something only for layers with a KV cache; ``past`` where it is about the
            tokens before a query, which a model's encoder and cross-attention do not have.
        not_in_encoders: why no encoder layer can ask for it; empty where one can.
        executed: the values that were executed somewhere; None: all of them.
        never_executed: the mark on the plans for all other values.
    """

    field: str
    what: str
    help: str
    flag: str = ""
    metavar: str | None = None
    fact: str = ""
    code: str = ""
    off: Any = False
    says: str = ""
    examples: tuple[Any, ...] = (True,)
    most: int | None = None
    belongs_to: Literal["", "cache", "past"] = ""
    not_in_encoders: str = ""
    executed: Collection[Any] | None = None
    never_executed: str = ""

    def __post_init__(self) -> None:
        spelled = self.field.replace("_", "-")
        self.flag = self.flag or f"--{spelled}"
        self.code = self.code or spelled
        self.fact = self.fact or self.field
        self.says = self.says or self.field.replace("_", " ")

    def accepts(self, declared: Any, value: Any) -> bool:
        """Whether a backend whose fact is ``declared`` serves a layer with this value of the field."""
        if value == self.off or declared is True:
            return True
        if isinstance(declared, tuple):
            return value in declared
        return declared is not False and bool(value <= declared)


_BOTH_WAYS = "encoders attend in both directions anyway"
_NO_DECODE = "encoders have no decode"

FEATURES: tuple[Feature, ...] = (
    Feature(
        "sliding_window",
        "sliding window",
        "Tokens that a query sees; 0: no window.",
        metavar="TOKENS",
        off=None,
        says="window {}",
        examples=(1, 5, 16, 33, 200),
        belongs_to="past",
    ),
    Feature(
        "attention_chunk_size",
        "attention inside chunks",
        "Tokens of the chunks that queries see no further than (Llama 4); 0: no chunks.",
        metavar="TOKENS",
        off=None,
        says="chunks of {}",
        examples=(20, 16, 32, 48),
        belongs_to="past",
        not_in_encoders="encoders attend to all tokens or to a window",
    ),
    Feature(
        "logits_soft_cap",
        "logits soft cap",
        "Logits soft cap; 0: none.",
        flag="--soft-cap",
        off=None,
        says="soft cap {:g}",
        examples=(5.0, 30.0),
        belongs_to="past",
    ),
    Feature("alibi", "ALiBi slopes", "ALiBi slopes.", belongs_to="past"),
    Feature("sinks", "attention sinks", "A learned sink logit per head.", belongs_to="past"),
    Feature(
        "position_bias",
        "position biases in the scores",
        "A bias for each head and distance is added to the scores (T5, Inkling).",
    ),
    Feature(
        "dual_chunk",
        "dual chunk attention",
        "Positions count within chunks and between them (Qwen2.5-1M); without effect below one chunk of tokens.",
        belongs_to="past",
        not_in_encoders="encoders attend to all tokens or to a window",
    ),
    Feature(
        "mm_prefix",
        "bidirectional multimodal prefix",
        "Image tokens attend to each other in both directions.",
        belongs_to="past",
        not_in_encoders=_BOTH_WAYS,
    ),
    Feature(
        "non_causal",
        "non-causal attention over the paged cache",
        "Bidirectional attention over the paged cache.",
        belongs_to="past",
        not_in_encoders=_BOTH_WAYS,
    ),
    Feature("batch_invariant", "batch invariance", "Results must not depend on the batch."),
    Feature("per_head_quant_scales", "per-head quantisation scales", "One FP8 scale per KV head.", belongs_to="cache"),
    Feature(
        "decode_context_parallel_size",
        "decode context parallel size",
        "Ranks that share one request's KV cache in decode.",
        flag="--dcp",
        metavar="RANKS",
        fact="decode_context_parallel",
        code="decode-context-parallel",
        off=1,
        says="DCP {}",
        examples=(2,),
        belongs_to="cache",
        not_in_encoders=_NO_DECODE,
    ),
    Feature(
        "output_quantization",
        "output quantisation",
        f"Quantise the output in the kernel: {', '.join(OUTPUT_QUANTIZATIONS)}.",
        metavar="KIND",
        fact="output_quantizations",
        off="none",
        says="output {}",
        examples=OUTPUT_QUANTIZATIONS[1:],
        executed=("fp8",),
        never_executed="FP4 output was never executed on a GPU, and the conformance suite has no reference for it",
    ),
    Feature(
        "num_speculative_tokens",
        "speculative tokens",
        "Draft tokens per request and step.",
        flag="--speculative-tokens",
        metavar="N",
        fact="speculative_tokens",
        code="speculative-tokens",
        off=0,
        says="{} speculative tokens",
        examples=(1, 2, 3, 4),
        most=MOST_SPECULATIVE_TOKENS,
        belongs_to="cache",
        not_in_encoders=_NO_DECODE,
    ),
    Feature(
        "draft_tree",
        "trees of draft tokens",
        "Draft tokens form a tree: each sees its ancestors alone (with --speculative-tokens).",
        belongs_to="cache",
        not_in_encoders=_NO_DECODE,
    ),
)
