"""A group of commands that names its commands where one is asked for that it does not have; each takes ``-v``."""

from __future__ import annotations

from typing import Any

import click

from attn_select_cli.help import Command


def _say(ctx: click.Context, parameter: click.Parameter, verbose: bool) -> None:
    if verbose and not ctx.resilient_parsing:
        import logging

        logging.basicConfig(format="%(message)s")
        for package in ("attn_select", "attn_select_cli", "attn_select_measure"):
            logging.getLogger(package).setLevel(logging.INFO)


def _verbose_option() -> click.Option:
    text = "Say on stderr what is read and what is decided."
    return click.Option(["-v", "--verbose"], is_flag=True, is_eager=True, expose_value=False, callback=_say, help=text)


class CommandGroup(click.Group):
    """A group whose error for an unknown command lists the nearest, or all. ``-v`` may stand before or behind one."""

    command_class = Command

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.params.append(_verbose_option())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = self.find_command(ctx, cmd_name)
        if command is not None and not any("--verbose" in parameter.opts for parameter in command.params):
            command.params.append(_verbose_option())
        return command

    def find_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Return the command of this name, None where there is none."""
        return super().get_command(ctx, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            if args[0] not in names:
                from attn_select.errors import UnknownNameError

                kind = "command" if ctx.parent is None else f"{ctx.info_name} command"
                raise UnknownNameError(kind, args[0], names)
        return super().resolve_command(ctx, args)
