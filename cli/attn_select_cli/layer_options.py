"""The options that say which layer, device, libraries and rules are meant, shared by explain, diff and matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attn_select_cli import complete

if TYPE_CHECKING:
    from attn_select.decide import Decider
    from attn_select_cli.report import Report

F = TypeVar("F", bound=Callable[..., Any])

# Option → AttentionConfig field, for everything that overrides what the model says.
_FIELDS = {
    "dtype": "dtype",
    "kv_cache_dtype": "kv_cache_dtype",
    "block_size": "block_size",
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "head_size": "head_size",
    "v_head_size": "v_head_size",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "sparse_top_k": "sparse_top_k",
    "attn_type": "attn_type",
    "sliding_window": "sliding_window",
    "soft_cap": "logits_soft_cap",
    "sinks": "sinks",
    "alibi": "alibi",
    "mm_prefix": "mm_prefix",
    "non_causal": "non_causal",
    "batch_invariant": "batch_invariant",
    "per_head_quant_scales": "per_head_quant_scales",
    "output_quantization": "output_quantization",
    "dcp": "decode_context_parallel_size",
    "speculative_tokens": "num_speculative_tokens",
    "cuda_graph": "cuda_graph",
}
# What `--mla` alone means: the dims of DeepSeek-V2 and V3 (arXiv 2405.04434, table 1; 2412.19437, section 4.2).
_DEEPSEEK_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


_KV_CACHE_DTYPES = complete.choices("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e5m2", "fp8_ds_mla", "nvfp4")
_ATTN_TYPES = complete.choices("decoder", "encoder", "encoder_only", "encoder_decoder")
_RULES_HELP = "One more rules file, above all others (repeatable)."


def _flag(name: str, text: str) -> Callable[[F], F]:
    return click.option(f"--{name}/--no-{name}", default=None, help=text)


_LAYER: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--dtype",
        type=complete.choices("auto", "bfloat16", "float16", "float32"),
        metavar="DTYPE",
        help="Compute dtype: bfloat16, float16, float32 [default: the model's].",
    ),
    click.option(
        "--kv-cache-dtype",
        type=_KV_CACHE_DTYPES,
        metavar="DTYPE",
        help="auto, bfloat16, float16, float32, fp8 (= fp8_e4m3), fp8_e5m2, fp8_ds_mla, nvfp4.",
    ),
    click.option(
        "--block-size", type=int, metavar="TOKENS", help="Tokens per cache block [default: the selection chooses]."
    ),
    click.option("--num-heads", type=int, help="Query heads of the model, before tensor parallelism."),
    click.option(
        "--num-kv-heads", type=int, help="KV heads of the model, before tensor parallelism [default: --num-heads]."
    ),
    click.option("--head-size", type=int, help="Width of a query and key head."),
    click.option("--v-head-size", type=int, help="Width of a value head where it differs."),
    click.option(
        "--mla",
        is_flag=True,
        help="Multi-head latent attention, with DeepSeek-V3's dims where the next four are not given.",
    ),
    click.option("--kv-lora-rank", type=int, help="MLA: width of the compressed KV."),
    click.option("--qk-nope-head-dim", type=int, help="MLA: query head width without position."),
    click.option("--qk-rope-head-dim", type=int, help="MLA: query head width with position."),
    click.option("--v-head-dim", type=int, help="MLA: value head width."),
    click.option(
        "--sparse-top-k", type=int, metavar="TOKENS", help="Sparse MLA: tokens attended to (DeepSeek-V3.2: 2048)."
    ),
    click.option(
        "--attn-type",
        type=_ATTN_TYPES,
        metavar="TYPE",
        help="decoder, encoder, encoder_only, encoder_decoder (cross-attention).",
    ),
    click.option("--sliding-window", type=int, metavar="TOKENS", help="Tokens that a query sees; 0: no window."),
    click.option("--soft-cap", type=float, help="Logits soft cap; 0: none."),
    _flag("sinks", "A learned sink logit per head."),
    _flag("alibi", "ALiBi slopes."),
    _flag("mm-prefix", "Image tokens attend to each other in both directions."),
    _flag("non-causal", "Bidirectional attention over the paged cache."),
    _flag("batch-invariant", "Results must not depend on the batch."),
    _flag("per-head-quant-scales", "One FP8 scale per KV head."),
    click.option("--output-quantization", metavar="KIND", help="Quantise the output in the kernel: none, fp8, fp4."),
    click.option(
        "--tensor-parallel", "-tp", type=int, default=1, show_default=True, help="Ranks that share the heads."
    ),
    click.option("--dcp", type=int, metavar="RANKS", help="Decode context parallel size."),
    click.option("--speculative-tokens", type=int, metavar="N", help="Draft tokens per request and step."),
    click.option(
        "--cuda-graph",
        metavar="LEVEL",
        help="Least level needed: NEVER, UNIFORM_SINGLE_TOKEN_DECODE, UNIFORM_BATCH, ALWAYS.",
    ),
)
_CONTEXT: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--with",
        "pins",
        multiple=True,
        metavar="LIB==VERSION",
        help="Judge as if this library version were installed (repeatable).",
    ),
    click.option(
        "--rules",
        multiple=True,
        type=click.Path(),
        metavar="FILE",
        help=_RULES_HELP,
    ),
)
_MODEL = click.option(
    "--model",
    "-m",
    shell_complete=complete.models,
    metavar="NAME|PATH",
    help="A preset (`attn-select models`), a config.json or a folder holding one.",
)
_GPU = click.option(
    "--gpu",
    "-g",
    shell_complete=complete.gpus,
    default="auto",
    show_default=True,
    metavar="NAME|smNN|N.M|cpu|auto",
    help="The device; auto is this machine's.",
)
_BACKEND = click.option(
    "--backend",
    "-b",
    shell_complete=complete.backends,
    multiple=True,
    metavar="[PHASE=]NAME",
    help="Choose explicitly, against every rule (repeatable).",
)


def _apply(function: F, options: tuple[Callable[[Any], Any], ...]) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def layer_options(function: F) -> F:
    """Add the options that describe the layer itself."""
    return _apply(function, _LAYER)


def context_options(function: F) -> F:
    """Add ``--with`` and ``--rules``."""
    return _apply(function, _CONTEXT)


def report_options(function: F) -> F:
    """Add everything that one report needs: model, GPU, backend, layer, libraries, rules."""
    return _apply(function, (_MODEL, _GPU, _BACKEND, *_LAYER, *_CONTEXT))


def run_options(function: F) -> F:
    """Add what a run on this machine needs: all of ``report_options`` but the GPU."""
    return _apply(function, (_MODEL, _BACKEND, *_LAYER, *_CONTEXT))


def overrides_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``AttentionConfig`` fields that the options set."""
    overrides = {field: options[option] for option, field in _FIELDS.items() if options.get(option) is not None}
    if overrides.get("dtype") == "auto":
        del overrides["dtype"]
    if options.get("mla"):
        overrides = {**_DEEPSEEK_DIMS, **overrides}
    return overrides


def build_report(options: Mapping[str, Any]) -> Report:
    """Decide for the model (or the one layer that flags describe) and return the report.

    Raises:
        AttnSelectError: any documented error of input.
    """
    from attn_select import detection
    from attn_select.device import Device, lookup
    from attn_select.environment import parse_pins
    from attn_select.selector import decider_for, environment_for, select_model
    from attn_select_cli import model_configs
    from attn_select_cli.report import LayerReport, Report

    overrides = overrides_from(options)
    if options["model"] is None and "num_heads" not in overrides:
        raise click.UsageError(
            "which layer? Give --model, or --num-heads with --head-size (or --mla)",
            click.get_current_context(silent=True),
        )
    warnings: list[str] = []
    if options["gpu"].strip().lower() == "auto":
        found = detection.detect_device()
        device: Device = found.device
        warnings += [*([found.note] if found.note else []), *found.warnings]
    else:
        device = lookup(options["gpu"])
    environment = environment_for(device, parse_pins(options["pins"]))
    source = model_configs.load(options["model"]) if options["model"] is not None else None
    kinds = model_configs.layer_kinds(
        source, tensor_parallel_size=options["tensor_parallel"], device=device, overrides=overrides
    )
    decider = decider_for(device, tuple(options["rules"]) or None, environment)
    warnings += unknown_pins(environment.pins, decider)
    rules = tuple(options["rules"]) or None
    backend = tuple(options["backend"]) or None
    configs = [kind.config for kind in kinds.kinds]
    selections = select_model(configs, device, rules, backend, environment=environment)
    described = {"name": source.name, "architecture": source.architecture, "source": source.source} if source else None
    layers = [LayerReport(k.kind, k.count, s) for k, s in zip(kinds.kinds, selections, strict=True)]
    return Report(described, layers, [*warnings, *kinds.warnings], decider)


def unknown_pins(pins: Mapping[str, str], decider: Decider) -> list[str]:
    """Return a warning for every ``--with`` library that neither a backend nor a rule asks about."""
    from attn_select.environment import canonical_distribution
    from attn_select.errors import UnknownNameError

    specs = decider.registry.specs.values()
    known = {"cuda", *(x.distribution for spec in specs for group in spec.libraries for x in group)}
    conditions = [condition.field for rule in decider.rules.rules for condition in rule.when]
    known |= {canonical_distribution(f.removeprefix("library.")) for f in conditions if f.startswith("library.")}
    return [
        f"--with {name}: no backend and no rule asks about it; {UnknownNameError('library', name, sorted(known)).hint}"
        for name in pins
        if name not in known
    ]
