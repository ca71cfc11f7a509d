"""``attn-select explain``: which backend, why, and why each other one is not."""

from __future__ import annotations

from typing import Any

import click

from attn_select_cli.layer_options import build_report, report_options

EPILOG = """\b
Examples:
  attn-select explain --model llama-3-8b --gpu h100
  attn-select explain --model deepseek-v3 --gpu h100 --kv-cache-dtype fp8
  attn-select explain --model ./config.json --gpu b200 --tensor-parallel 8
  attn-select explain --num-heads 32 --num-kv-heads 8 --head-size 128 --gpu a100
  attn-select explain --model deepseek-v3 --gpu h100 --backend decode=FLASHMLA
  attn-select explain --model gpt-oss-120b --gpu rtx5090 --rules my_rules.toml --json

Exit code: 0 every layer has a backend in every phase, 1 one has none, 2 wrong input, 3 a bug.
"""


@click.command("explain", epilog=EPILOG)
@report_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON (documented in docs/json.md).")
def command(as_json: bool, **options: Any) -> int:
    """Show which backend serves each layer of a model on a GPU, and why each other one does not."""
    from attn_select_cli.output import print_json, print_lines

    report = build_report(options)
    if as_json:
        print_json(report.to_dict())
    else:
        print_lines(report.lines())
    return 0 if report.ok else 1
