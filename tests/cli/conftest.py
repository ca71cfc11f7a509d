"""Fixtures that run commands."""

from command_line import run, run_on_terminal

__all__ = ["run", "run_on_terminal"]
