"""Values for shell completion: names from the data files and plugins, and files where a path may stand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _starting(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name) for name in names if name.casefold().startswith(incomplete.casefold())]


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete presets, else files."""
    from click.shell_completion import CompletionItem

    from attn_select.layer.models import presets

    return _starting(presets(), incomplete) or [CompletionItem(incomplete, type="file")]


def gpus(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete GPU names."""
    from attn_select.machine.device import known_gpus

    return _starting(["auto", "cpu", *known_gpus()], incomplete)


def backends(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete backend names, also behind ``PHASE=``."""
    from click.shell_completion import CompletionItem

    from attn_select.backends.distributions import known_backends

    phase, equals, name = incomplete.rpartition("=")
    return [CompletionItem(f"{phase}{equals}{item.value}") for item in _starting(known_backends(), name)]


def workloads(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete profiles of workloads, else files."""
    from click.shell_completion import CompletionItem

    from attn_select.times.workload import PROFILES

    return _starting(PROFILES, incomplete) or [CompletionItem(incomplete, type="file")]


def choices(*names: str) -> click.types.StringParamType:
    """Return a parameter type that completes ``names`` and leaves checking to the library."""

    class Names(click.types.StringParamType):
        name = "text"

        def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
            return _starting(names, incomplete)

    return Names()
