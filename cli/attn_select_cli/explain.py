"""``attn-select explain``: which backend, why, and why each other one is not."""

from __future__ import annotations

from typing import Any

import click

from attn_select_cli.help import Command
from attn_select_cli.layer_options import engine_option, explain_options

EPILOG = """\b
Examples:
  attn-select explain --model llama-3-8b --gpu h100
  attn-select explain --model deepseek-v3 --gpu h100 --kv-cache-dtype fp8
  attn-select explain --model llama-3-8b --gpu l40s --full
  attn-select explain --model ./config.json --gpu b200 --tensor-parallel 8
  attn-select explain --num-heads 32 --num-kv-heads 8 --head-size 128 --gpu a100
  attn-select explain --model deepseek-v3 --gpu h100 --backend decode=FLASHMLA
  attn-select explain --model llama-3-8b --gpu h100 --workload '64q1s4k*0.8,q2k*0.2'
  attn-select explain --model gpt-oss-120b --gpu rtx5090 --rules my_rules.toml --json
  attn-select explain --model deepseek-v3 --gpu mi300x --engine vllm

Exit code: 0 every layer has a backend in every phase, 1 one has none or the model type is not known, 2 wrong input,
3 a bug.
"""


@click.command(
    "explain", cls=Command, epilog=EPILOG, short_help="Which backend serves each layer, and why each other does not."
)
@explain_options
@click.option(
    "--full", is_flag=True, help="Every candidate with its reasons, the rules that count, and the nearest misses."
)
@engine_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON (documented in docs/json.md).")
def command(model: tuple[str, ...], gpu: tuple[str, ...], full: bool, as_json: bool, **options: Any) -> int:
    """Show which backend serves each layer of a model on a GPU, and why each other one does not."""
    if full and as_json:
        raise click.UsageError("--full and --json contradict each other: JSON always holds all reasons")
    from attn_select_cli.explanation import SCHEMA_VERSION, build_explanations, warnings_of
    from attn_select_cli.output import print_json, print_lines, print_warnings

    explanations = build_explanations(options, model or (None,), gpu or ("auto",), unserved_alone=True)
    if as_json:
        documents = [explanation.to_dict() for explanation in explanations]
        several = {"schema_version": SCHEMA_VERSION, "explanations": documents}
        print_json(documents[0] if len(documents) == 1 else several)
    else:
        for index, explanation in enumerate(explanations):
            print_lines([*([[]] if index else []), *explanation.lines(full)])
    print_warnings(warnings_of(explanations))
    return 0 if all(explanation.ok for explanation in explanations) else 1
