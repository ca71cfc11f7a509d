"""The options that say which layer, device, libraries and rules are meant, shared by explain, diff and matrix."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from attn_select.engines import ENGINES
from attn_select.layer.config import ATTENTION_TYPES, CUDA_GRAPH_LEVELS, AttentionConfig
from attn_select.layer.dtypes import DTYPES, KV_CACHE_DTYPES, canonical
from attn_select.layer.features import FEATURES, Feature
from attn_select.layer.state import RECURRENCES, StateConfig
from attn_select_cli import complete

F = TypeVar("F", bound=Callable[..., Any])


def _feature_option(feature: Feature) -> Callable[[Any], Any]:
    """Return the option by which a feature is asked for; its value is passed as the feature's field."""
    if feature.off is False:
        flags = f"{feature.flag}/--no-{feature.flag.removeprefix('--')}"
        return click.option(flags, feature.field, default=None, help=feature.help)
    example = feature.examples[0]
    accepted = complete.choices(feature.off, *feature.examples) if isinstance(example, str) else type(example)
    return click.option(feature.flag, feature.field, type=accepted, metavar=feature.metavar, help=feature.help)


_STORED = tuple(name for name in KV_CACHE_DTYPES if name != "nvfp4")
"""No backend runs on an NVFP4 cache, which attn_select.runtime cannot allocate: it is not offered."""

# The value of an option that sets a field of AttentionConfig is passed under the field's name.
_LAYER: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--dtype",
        type=complete.choices("auto", *DTYPES),
        metavar="DTYPE",
        help=f"Compute dtype: {', '.join(DTYPES)} [default: the model's].",
    ),
    click.option(
        "--kv-cache-dtype",
        type=complete.choices(*_STORED),
        metavar="DTYPE",
        help=f"Stored dtype of the KV cache: {', '.join(_STORED)}; fp8 is {canonical('fp8')}.",
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
        help="Multi-head latent attention instead of keys and values per head, with DeepSeek-V3's dims where the next "
        "four are not given.",
    ),
    click.option(
        "--recurrence",
        type=complete.choices(*RECURRENCES),
        metavar="NAME",
        help=f"A layer that keeps a state, without --model: {', '.join(RECURRENCES)}.",
    ),
    click.option("--num-v-heads", type=int, help="State layers: value heads [default: --num-heads]."),
    click.option("--conv-kernel-size", type=int, help="State layers: tokens that the convolution sees; 0: none."),
    click.option(
        "--state-dtype",
        type=complete.choices(*DTYPES),
        metavar="DTYPE",
        help="State layers: stored dtype of the state [default: the model's, else float32].",
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
        type=complete.choices(*ATTENTION_TYPES),
        metavar="TYPE",
        help=f"{', '.join(ATTENTION_TYPES)} (cross-attention).",
    ),
    *map(_feature_option, FEATURES),
    click.option(
        "--tensor-parallel", "-tp", "--tp", type=int, default=1, show_default=True, help="Ranks that share the heads."
    ),
    click.option(
        "--assume-attention",
        is_flag=True,
        help="Read a model type that is not known as a Llama-like decoder; else it is an error (exit code 1).",
    ),
    click.option(
        "--cuda-graph",
        type=complete.choices(*CUDA_GRAPH_LEVELS),
        metavar="LEVEL",
        help=f"Least level needed: {', '.join(CUDA_GRAPH_LEVELS)}.",
    ),
)
rules_option = click.option(
    "--rules",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="One more rules file, above all others (repeatable).",
)
_CONTEXT: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--with",
        "pins",
        multiple=True,
        metavar="LIB==VERSION",
        help="Judge as if this library version were installed (repeatable).",
    ),
    rules_option,
)


def _only_one(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the one value of an option; click would take the last of several without a word."""
    if len(values) > 1:
        raise click.UsageError(
            f"--{parameter.name} is given {len(values)} times ({', '.join(values)}): `{ctx.command_path}` takes one. "
            "`attn-select explain` and `attn-select matrix` take several",
            ctx,
        )
    return values[0] if values else None


def model_option(text: str, *, several: bool) -> Callable[[Any], Any]:
    """Return ``--model`` with this help; its value is a tuple where ``several`` are accepted, else a name or None."""
    return click.option(
        "--model",
        "-m",
        shell_complete=complete.models,
        multiple=True,
        callback=None if several else _only_one,
        metavar="NAME|PATH",
        help=text,
    )


def gpu_option(text: str, *, several: bool) -> Callable[[Any], Any]:
    """Return ``--gpu`` with this help; its value is a tuple where ``several`` are accepted, else a name or None."""
    return click.option(
        "--gpu",
        "-g",
        shell_complete=complete.gpus,
        multiple=True,
        callback=None if several else _only_one,
        metavar="NAME|smNN|N.M|cpu|auto",
        help=text,
    )


# The models and GPUs of a table of pairs where none are named.
MODELS = ("llama-3-8b", "qwen3-32b", "gemma-3-27b", "gpt-oss-120b", "deepseek-v3", "deepseek-v3.2", "bert-base")
GPUS = ("a100", "l40s", "h100", "b200", "rtx5090")
_MODEL_HELP = (
    "A preset (`attn-select models`), a config.json, a folder holding one, or org/name in the Hugging Face cache"
)
_GPU_HELP = "The device [default: auto, which is this machine's]"
_ONE_MODEL = model_option(f"{_MODEL_HELP}.", several=False)


_BACKEND = click.option(
    "--backend",
    "-b",
    shell_complete=complete.backends,
    multiple=True,
    metavar="[PHASE=]NAME",
    help="Choose explicitly, against every rule (repeatable).",
)
_ONLY_BACKEND = click.option(
    "--backend",
    "-b",
    type=complete.BackendName(),
    multiple=True,
    metavar="NAME",
    help="Only this backend (repeatable) [default: every one that is valid].",
)


def decision_options(function: F, *first: Callable[[Any], Any], backend: Callable[[Any], Any] = _BACKEND) -> F:
    """Add the options ``first``, then what every decision takes: ``--backend``, the layer, libraries and rules."""
    for option in reversed((*first, backend, *_LAYER, *_CONTEXT)):
        function = option(function)
    return function


def workload_options(function: F) -> F:
    """Add the options that say which batches a decision is for, and which times count."""
    function = click.option(
        "--host-time",
        is_flag=True,
        help="Let a step take at least the host time of an eager call, as without CUDA graphs.",
    )(function)
    function = click.option("--no-times", is_flag=True, help="Let rules alone decide.")(function)
    function = click.option(
        "--times",
        "times",
        type=click.Path(),
        metavar="FILE",
        help="A survey's file in place of yours or the packaged one.",
    )(function)
    return click.option(
        "--workload",
        "-w",
        shell_complete=complete.workloads,
        metavar="SHAPES|PROFILE|FILE",
        help="The batches to be fast at: 64q1s4k*0.8,q2k*0.2 (requests, q new tokens, s all tokens; shares), "
        "a profile (chat, long-context, offline, speculative, agent, serving) or a .toml file.",
    )(function)


engine_option = click.option(
    "--engine",
    "-e",
    type=complete.choices(*ENGINES),
    metavar="NAME",
    help=f"What an engine's own backends accept, and which it takes by itself: {', '.join(ENGINES)}.",
)


def explain_options(function: F) -> F:
    """Add the options of decisions for any number of models and GPUs."""
    model = model_option(f"{_MODEL_HELP} (repeatable).", several=True)
    return decision_options(workload_options(function), model, gpu_option(f"{_GPU_HELP} (repeatable).", several=True))


def diff_options(function: F) -> F:
    """Add the options of one decision: one model, one GPU."""
    return decision_options(workload_options(function), _ONE_MODEL, gpu_option(f"{_GPU_HELP}.", several=False))


def pair_options(function: F) -> F:
    """Add ``--model`` and ``--gpu``; ``models_and_gpus`` reads them."""
    function = gpu_option(f"A device (repeatable) [default: {', '.join(GPUS)}].", several=True)(function)
    with_both: F = model_option(f"A model (repeatable) [default: {', '.join(MODELS)}].", several=True)(function)
    return with_both


def models_and_gpus(options: dict[str, Any]) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Take the options of ``pair_options`` out of ``options``; return the models and the GPUs."""
    model, gpu = options.pop("model"), options.pop("gpu")
    if options["num_heads"] is not None and not model:
        model = (None,)  # flags alone describe one layer
    return model or MODELS, gpu or GPUS


def run_options(function: F) -> F:
    """Add the options of one decision for this machine."""
    return decision_options(function, _ONE_MODEL)


def bench_options(function: F) -> F:
    """Add the options of one model's layers on this machine, whose ``--backend`` names candidates."""
    return decision_options(function, _ONE_MODEL, backend=_ONLY_BACKEND)


def options_in(text: str, flag: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse ``text``, the value of ``flag``, as options of one decision. Return all options, and the named ones."""
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}", param_hint=flag) from None

    @click.command(flag, add_help_option=False)
    @diff_options
    def parsed(**options: Any) -> None:
        """Never run; only its parameters are used."""

    calling = click.get_current_context(silent=True)
    if arguments and not arguments[0].startswith("-"):
        from attn_select.errors import AttnSelectError
        from attn_select.machine.device import lookup

        example = "--gpu b200"
        with contextlib.suppress(AttnSelectError):
            lookup(arguments[0])
            example = f"--gpu {text}"
        write = f"write an option and its value, such as {flag} {example!r}"
        raise click.UsageError(f"{flag} {text!r} is no option: {write}", calling)
    context = parsed.make_context(f"{calling.command_path if calling else 'attn-select'} {flag}", arguments)
    given = click.core.ParameterSource.COMMANDLINE
    return context.params, {k: v for k, v in context.params.items() if context.get_parameter_source(k) is given}


def flag_of(field: str) -> str:
    """Return the option that set a field."""
    flags = {feature.field: feature.flag for feature in FEATURES}
    return flags.get(field, f"--{field.replace('_', '-')}")


def overrides_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides of a model that the options set, as ``configs_from_model`` takes them."""
    fields = dict.fromkeys((*AttentionConfig.model_fields, *StateConfig.model_fields))
    overrides = {field: options[field] for field in fields if options.get(field) is not None}
    if overrides.get("dtype") == "auto":
        del overrides["dtype"]
    return {**overrides, "mla": True} if options.get("mla") else overrides
