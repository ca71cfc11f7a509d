"""``attn-select gpus``: the GPUs known by name."""

from __future__ import annotations

import click

from attn_select_cli.help import Command

EPILOG = """\b
Examples:
  attn-select gpus
  attn-select gpus --json    (with the source of each row's figures)

A GPU that is not listed can be asked about by its compute capability: --gpu sm90 or --gpu 9.0.
"""


@click.command("gpus", cls=Command, epilog=EPILOG, short_help="The GPUs known by name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> int:
    """List the GPUs known by name."""
    from attn_select.machine.device import known_gpus
    from attn_select_cli.output import print_json, print_lines
    from attn_select_cli.table import Table

    devices = [*known_gpus().values()]
    if as_json:
        print_json({"schema_version": 1, "gpus": [device.to_dict() for device in devices]})
        return 0
    header = ["name", "capability", "SMs", "GiB", "GB/s", "full name"]
    rows = []
    for device in devices:
        figures = (device.sm_count, device.memory_gib, device.bandwidth_gbps)
        known = ["-" if figure is None else f"{figure:g}" for figure in figures]
        rows.append([device.name, device.capability_text, *known, device.full_name])
    print_lines([Table(header, rows)])
    return 0
