"""``attn-select models``: the presets."""

from __future__ import annotations

import click

from attn_select_cli.help import Command

EPILOG = """\b
Examples:
  attn-select models
  attn-select models --json    (with the repositories that lead to each preset, and where its values come from)

Names of repositories lead to presets too. Any other model: give --model the path of its config.json, or of the folder
that holds it, or its name org/name where the local Hugging Face cache has it (`hf download org/name config.json` puts
it there).
"""


@click.command("models", cls=Command, epilog=EPILOG, short_help="The model presets.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> int:
    """List the model presets."""
    from attn_select.layer.models import presets
    from attn_select_cli.output import print_json, print_lines
    from attn_select_cli.table import Table

    found = [*presets().values()]
    if as_json:
        listed = [
            {"name": each.name, "names": [*each.names], "description": each.description, "source": each.source}
            for each in found
        ]
        print_json({"schema_version": 1, "models": listed})
    else:
        print_lines([Table(["name", "attention"], [[preset.name, preset.description] for preset in found])])
    return 0
