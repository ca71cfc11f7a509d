"""``attn-select run``: one layer of a model serves requests on this machine, and every output is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import run_options

if TYPE_CHECKING:
    from attn_select_cli.explanation import LayerExplanation
    from attn_select_cli.serving import RunResult, Workload
    from attn_select_cli.table import Block

EPILOG = """\b
Examples:
  attn-select run --model llama-3-8b
  attn-select run --model deepseek-v3 --requests 2 --prompt-tokens 128
  attn-select run --model gemma-3-27b --layer sliding_attention --kv-cache-dtype fp8
  attn-select run --model llama-3-8b --backend TORCH_SDPA --json
  attn-select run --num-heads 8 --num-kv-heads 2 --head-size 64 --prompt-tokens 1000 --max-num-batched-tokens 256

Queries, keys and values are random. The reference is float64; an error is relative, in the Euclidean norm: of all
outputs of a step together, and of the worst row (one head of one token).

Exit code: 0 every error is within its bound, 1 one is not or a layer has no backend, 2 wrong input, 3 a bug.
"""


def _count(name: str, least: int, default: int, text: str) -> Callable[[Any], Any]:
    return click.option(name, type=click.IntRange(least), default=default, show_default=True, metavar="N", help=text)


@click.command("run", cls=Command, epilog=EPILOG, short_help="Run one layer of a model here and check every output.")
@run_options
@click.option("--layer", "layer", metavar="KIND", help="Run only this kind of the model's layers [default: each].")
@_count("--requests", 1, 4, "Requests in the batch.")
@_count("--prompt-tokens", 1, 256, "Length of the longest prompt; the others have half of it or more.")
@_count("--decode-steps", 0, 16, "Tokens generated per request.")
@_count("--max-num-batched-tokens", 1, 192, "Most tokens of one step: longer prompts are prefilled in chunks.")
@_count("--seed", 0, 0, "Seed of everything that is random.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (documented in docs/json.md).")
def command(layer: str | None, as_json: bool, **options: Any) -> int:
    """Run one attention layer of a model here, chunked prefill and decode on a paged cache, checked against float64."""
    from dataclasses import asdict

    from attn_select_cli.explanation import build_explanation
    from attn_select_cli.output import print_json, print_lines, print_warnings
    from attn_select_cli.progress import progress
    from attn_select_cli.torch_module import torch_module

    explanation = build_explanation({**options, "gpu": "auto"})
    chosen = chosen_layers(explanation.layers, layer)
    for one in chosen:
        one.selection.require()
    serving = torch_module("attn_select_cli.serving", "running a layer")
    names = ("prompt_tokens", "decode_steps", "max_num_batched_tokens", "seed")
    workload = serving.Workload(num_requests=options["requests"], **{name: options[name] for name in names})
    served: list[tuple[LayerExplanation, RunResult | str]] = []
    for one in chosen:
        if (reason := serving.unserved(one.selection.config)) is not None:
            served.append((one, reason))
            continue
        tokens = sum(workload.prompts()) + workload.num_requests * workload.decode_steps
        with progress(f"{one.kind}: checking {tokens} tokens", tokens) as shown:
            served.append((one, serving.serve(one.selection, workload, shown.advance)))
    results = [outcome for _, outcome in served if not isinstance(outcome, str)]
    ok = bool(results) and all(result.ok for result in results)
    warnings = explanation.all_warnings
    if any(getattr(one.selection.config, "decode_context_parallel_size", 1) > 1 for one in chosen):
        warnings.append("one process runs here, with the whole cache: --dcp decides which backends are valid, no more")
    if as_json:
        document = {**explanation.to_dict(), "warnings": warnings}
        document["layers"] = [_to_dict(one, outcome) for one, outcome in served]
        print_json({**document, "ok": ok, "workload": asdict(workload)})
    else:
        lines: list[Block] = [*explanation.head_lines()]
        for one, outcome in served:
            lines += [[], *_lines(one, outcome, workload)]
        print_lines(lines)
    print_warnings(warnings)
    return 0 if ok else 1


def chosen_layers(layers: Any, kind: str | None) -> list[LayerExplanation]:
    """Return the layers of one kind, of every kind where it is None."""
    from attn_select.errors import UnknownNameError

    kinds = [one.kind for one in layers]
    wanted = None if kind is None else kind.casefold().replace("-", "_")
    if kind is not None and wanted not in kinds:
        raise UnknownNameError("layer kind", kind, kinds)
    return [one for one in layers if wanted in (None, one.kind)]


def _lines(one: LayerExplanation, served: RunResult | str, workload: Workload) -> list[Block]:
    from attn_select.decide.lines import byte_text
    from attn_select.decide.text import plan_lines
    from attn_select_cli.output import counted
    from attn_select_cli.table import Table

    lines = plan_lines(one.selection, one.kind, one.count, owners=one.layers.owners)
    if isinstance(served, str):
        return [*lines, [("  not run          ", "warning"), (served, "")]]
    if served.cache_shape is not None:
        unit = "slots" if one.selection.config.sort == "state" else "blocks"
        size = f"{served.num_blocks} {unit}, {byte_text(served.cache_bytes)} for one layer"
        lines.append([("  allocated        ", "dim"), (size, "")])
    prompts, steps = served.prompts, workload.decode_steps if one.selection.config.has_cache else 0
    lengths = f"{min(prompts)} to {max(prompts)}" if min(prompts) < max(prompts) else str(max(prompts))
    work = f"  {counted(len(prompts), 'request')} of {lengths} prompt tokens"
    if steps:
        work += f", then {counted(steps, 'decode step')} each; at most {workload.max_num_batched_tokens} tokens a step"
    lines += [[], [(work, "")]]
    header = ["  steps", "number", "tokens", "ms a step", "us a token", "error", "worst row", "verdict"]
    rows = []
    for kind in served.kinds:
        rows.append(
            [
                f"  {kind.name}",
                str(kind.steps),
                str(kind.tokens),
                f"{kind.seconds / kind.steps * 1e3:.2f}",
                f"{kind.seconds / kind.tokens * 1e6:.1f}",
                f"{kind.error.norm:.1e}",
                f"{kind.error.row:.1e}",
                "within" if served.within(kind) else "ABOVE",
            ]
        )
    bound = ["  bound", "", "", "", "", f"{served.bound.norm:.1e}", f"{served.bound.row:.1e}", served.bound.because]
    return [*lines, Table(header, [*rows, bound])]


def _to_dict(one: LayerExplanation, served: RunResult | str) -> dict[str, Any]:
    told = one.to_dict()
    if isinstance(served, str):
        return {**told, "run": None, "not_run": served}
    return {
        **told,
        "run": {
            "ok": served.ok,
            "prompts": served.prompts,
            "num_blocks": served.num_blocks,
            "cache_shape": None if served.cache_shape is None else list(served.cache_shape),
            "cache_bytes": served.cache_bytes,
            "bound": {"norm": served.bound.norm, "row": served.bound.row, "because": served.bound.because},
            "steps": [
                {
                    "kind": kind.name,
                    "steps": kind.steps,
                    "tokens": kind.tokens,
                    "seconds": kind.seconds,
                    "error": {"norm": kind.error.norm, "row": kind.error.row},
                }
                for kind in served.kinds
            ],
        },
    }
