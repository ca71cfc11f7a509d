"""Entry point: finds the command, and turns every error into one clear message and the right exit code.

Exit codes: 0 done, 1 the answer is no (no backend, a difference, a lint error), 2 wrong usage or input,
3 a bug of attn-select or of a plugin.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.metadata
import os
import sys
from typing import Any, NoReturn

import click

from attn_select.errors import AttnSelectError
from attn_select_cli.command_group import CommandGroup

BROKEN_PIPE = 141
"""What a shell reports of a program that SIGPIPE ended."""
COMMANDS = (
    "explain",
    "flags",
    "run",
    "warm",
    "matrix",
    "diff",
    "cache",
    "backends",
    "rules",
    "models",
    "gpus",
    "doctor",
)
OTHERS = "attn_select.commands"
"""The group of entry points by which other distributions bring commands: its name, and ``MODULE:COMMAND``."""
MEASURE = "attn-select-measure"
OF_MEASURE = ("survey", "bench", "tune", "report")
"""The commands of ``attn-select-measure``: where it is not installed, they say what to install."""
_ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
"""Of a command that only says why it is not here."""


class LazyGroup(CommandGroup):
    """A group that imports a command's module only when that command (or the list of all) is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        brought = sorted(each.name for each in brought_commands())
        return [*dict.fromkeys([*COMMANDS[:3], *OF_MEASURE, *COMMANDS[3:], *brought])]

    def find_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in COMMANDS:
            command: click.Command = importlib.import_module(f"attn_select_cli.{name}").command
            return command
        for entry_point in brought_commands():
            if entry_point.name == name:
                return brought_command(entry_point)
        return missing_command(name) if name in OF_MEASURE else None


def brought_commands() -> list[importlib.metadata.EntryPoint]:
    """Return the commands that other distributions bring. One whose metadata cannot be read brings none."""
    from attn_select.machine.environment import entry_points

    return entry_points(OTHERS)[0]


def brought_command(entry_point: importlib.metadata.EntryPoint) -> click.Command:
    """Return the command that another distribution brings, or where it cannot be loaded one that says why."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            command = entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a stranger's module raises on import, SystemExit included
        why = f"{type(error).__name__}: {error}"
    else:
        if isinstance(command, click.Command):
            return command
        why = f"{entry_point.value} is no click.Command"
    from attn_select.errors import shorten

    owner = entry_point.dist.name if entry_point.dist is not None else entry_point.value
    text = f"{owner}, which brings it, cannot be used: {shorten(why, 300)}"

    def say_why() -> NoReturn:
        from attn_select.errors import PluginError

        raise PluginError(f"attn-select {entry_point.name}: {text}", hint=f"reinstall or uninstall {owner}")

    return click.Command(entry_point.name, _ANY_ARGUMENTS, say_why, help=f"Broken: {text}", add_help_option=False)


def missing_command(name: str) -> click.Command:
    """Return the command in place of one of ``attn-select-measure``, which is not installed."""

    def say_what_to_install() -> NoReturn:
        from attn_select.backends.distributions import install_command
        from attn_select.errors import RuntimeMissingError

        text = f"attn-select {name} is a command of {MEASURE}, which is not installed"
        raise RuntimeMissingError(text, hint=install_command(MEASURE))

    text = f"Not here: {MEASURE} brings it."
    return click.Command(name, _ANY_ARGUMENTS, say_what_to_install, help=text, add_help_option=False)


EPILOG = """\b
Examples:
  attn-select explain --model llama-3-8b --gpu h100
  attn-select run --model llama-3-8b
  attn-select matrix --model deepseek-v3 --gpu h100 --gpu b200
  attn-select doctor

`attn-select COMMAND --help` shows the options and more examples.

Exit code: 0 done, 1 the answer is no (no backend, a difference, a problem), 2 wrong usage or input, 3 a bug.

Shell completion: eval "$(_ATTN_SELECT_COMPLETE=bash_source attn-select)" (or zsh_source, fish_source).
"""


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EPILOG,
)
@click.version_option(None, "-V", "--version", package_name="attn-select", prog_name="attn-select")
def cli() -> None:
    """Pick the attention kernel for an LLM layer, say why, and run it."""


def main() -> NoReturn:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors are printed, never raised."""
    as_json = "--json" in arguments
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "stdout is closed")
        result: Any = cli.main(arguments or ["--help"], prog_name="attn-select", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.exceptions.Exit as request:
        return request.exit_code
    except SystemExit as stop:  # click's own: completion, and a reader that went away
        return BROKEN_PIPE if type(sys.stdout).__name__ == "PacifyFlushWrapper" else int(stop.code or 0)
    except click.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = None if context is None else f"`{context.command_path.partition(' --')[0]} --help` shows the options"
        message = error.format_message()
        if context is not None and message.startswith("Got unexpected extra argument"):
            takes_models = any(parameter.name == "model" for parameter in context.command.params)
            hint = f"a model is given by --model; {hint}" if takes_models else hint
        return _fail(as_json, AttnSelectError(message, hint=hint, code="usage"), 2)
    except AttnSelectError as error:
        from attn_select.decide.selection import NoBackendError
        from attn_select.errors import BackendError, UnknownModelTypeError
        from attn_select.machine import variables

        if isinstance(error, BackendError) and variables.is_on(variables.TRACEBACK):
            raise
        code = 1 if isinstance(error, NoBackendError | UnknownModelTypeError) else 2
        return _fail(as_json, error, code)
    except BrokenPipeError:
        # The reader (head, less) went away. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        # Files that a user names are read elsewhere, with errors of their own: this is the output.
        if sys.stderr is not None:
            output = error.filename or "the output"
            click.echo(f"error: {output} cannot be written: {error.strerror or error}", err=True)
        return 2
    except Exception as error:
        from attn_select.machine import variables

        if variables.is_on(variables.TRACEBACK):
            raise
        hint = f"this is a bug: run it again with {variables.TRACEBACK}=1 and report what it prints"
        bug = AttnSelectError(f"{type(error).__name__}: {error}", hint=hint, code="internal-error")
        return _fail(as_json, bug, 3)


def _fail(as_json: bool, error: AttnSelectError, exit_code: int) -> int:
    if as_json:
        import json

        click.echo(json.dumps({"error": error.to_dict()}, indent=2, ensure_ascii=False))
    else:
        from attn_select.errors import printable

        click.echo("\n".join(printable(line) for line in f"error: {error.message}".split("\n")), err=True)
        if error.hint:
            click.echo(f"  hint: {error.hint}", err=True)
    return exit_code
