"""``attn-select gpus``: the GPUs known by name."""

from __future__ import annotations

import click

from attn_select_cli import complete
from attn_select_cli.help import Command

EPILOG = """\b
Examples:
  attn-select gpus
  attn-select gpus blackwell rtx
  attn-select gpus --json

A GPU that is not listed can be asked about by its compute capability: --gpu sm90 or --gpu 9.0.
"""


@click.command("gpus", cls=Command, epilog=EPILOG, short_help="The GPUs known by name.")
@click.argument("words", nargs=-1, metavar="[WORD]...", shell_complete=complete.gpus)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--sources", is_flag=True, help="Show where each row's figures come from.")
def command(words: tuple[str, ...], as_json: bool, sources: bool) -> int:
    """List the GPUs known by name. With WORDs: only names that contain all of them."""
    from attn_select.machine.device import known_gpus
    from attn_select_cli.output import print_json, print_lines
    from attn_select_cli.table import Table

    devices = [
        d
        for d in known_gpus().values()
        if all(w.casefold() in f"{d.name} {d.full_name} {d.capability_text}".casefold() for w in words)
    ]
    if as_json:
        print_json({"schema_version": 1, "gpus": [d.to_dict() for d in devices]})
    elif not devices:
        click.echo(
            f"no known GPU contains {' and '.join(words)}; a compute capability works too: --gpu sm90 or --gpu 9.0"
        )
    else:
        header = ["name", "capability", "SMs", "GiB", "GB/s", "full name", *(["source"] if sources else [])]
        rows = [
            [
                d.name,
                d.capability_text,
                _number(d.sm_count),
                _number(d.memory_gib),
                _number(d.bandwidth_gbps),
                d.full_name,
            ]
            + ([d.source] if sources else [])
            for d in devices
        ]
        print_lines([Table(header, rows)])
    return 0 if devices else 1


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
