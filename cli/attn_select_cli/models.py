"""``attn-select models``: the presets."""

from __future__ import annotations

import click

from attn_select_cli import complete
from attn_select_cli.help import Command

EPILOG = """\b
Examples:
  attn-select models
  attn-select models deepseek
  attn-select models --json

Names of repositories lead to presets too: --sources lists them. Any other model: give --model the path of its
config.json, or of the folder that holds it, or its name org/name where the local Hugging Face cache has it
(`hf download org/name config.json` puts it there).
"""


@click.command("models", cls=Command, epilog=EPILOG, short_help="The model presets.")
@click.argument("words", nargs=-1, metavar="[WORD]...", shell_complete=complete.models)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--sources", is_flag=True, help="Show the repositories that lead to each preset, and where its values come from."
)
def command(words: tuple[str, ...], as_json: bool, sources: bool) -> int:
    """List the model presets. With WORDs: only presets that contain all of them."""
    from attn_select.layer import models
    from attn_select_cli.output import print_json, print_lines
    from attn_select_cli.table import Table

    presets = [
        p
        for p in models.presets().values()
        if all(w.casefold() in f"{p.name} {' '.join(p.names)} {p.description}".casefold() for w in words)
    ]
    if as_json:
        listed = [
            {"name": p.name, "names": list(p.names), "description": p.description, "source": p.source} for p in presets
        ]
        print_json({"schema_version": 1, "models": listed})
    elif not presets:
        click.echo(f"no preset contains {' and '.join(words)}; --model also takes the path of a config.json")
    else:
        header = ["name", "attention", *(["repositories", "source"] if sources else [])]
        rows = [[p.name, p.description, *([", ".join(p.names), p.source] if sources else [])] for p in presets]
        print_lines([Table(header, rows)])
    return 0 if presets else 1
