"""A group of commands that names its commands where one is asked for that it does not have."""

from __future__ import annotations

import click


class CommandGroup(click.Group):
    """A group whose error for an unknown command lists the nearest, or all."""

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
