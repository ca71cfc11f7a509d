"""Values for shell completion: names from the data files and plugins, and files where a path may stand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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


class BackendName(click.types.StringParamType):
    """A known backend's name, as it is registered: taken in any case, with hyphens for underscores too."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name.

        Raises:
            UnknownNameError: no plugin registers such a backend, and no distribution is known for it.
        """
        from attn_select.backends.distributions import registered_name
        from attn_select.backends.registry import load_plugins
        from attn_select.errors import UnknownNameError
        from attn_select.rules.lint import known_names

        name, known = registered_name(super().convert(value, param, ctx)), known_names(load_plugins())
        if name not in known:
            raise UnknownNameError("backend", value, known)
        return name

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the names of known backends."""
        return backends(ctx, param, incomplete)


def workloads(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete profiles of workloads, else files."""
    from click.shell_completion import CompletionItem

    from attn_select.times.workload import PROFILES

    return _starting(PROFILES, incomplete) or [CompletionItem(incomplete, type="file")]


def _folded(name: str) -> str:
    return name.strip().casefold().replace("-", "_")


def choices(*names: str) -> click.types.StringParamType:
    """Return a parameter type that completes ``names``, takes them in any case, and leaves checking to the library."""
    by_folded = {_folded(name): name for name in names}

    class Names(click.types.StringParamType):
        name = "text"

        def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
            text = super().convert(value, param, ctx)
            return by_folded.get(_folded(text), text)

        def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
            return _starting(names, incomplete)

    return Names()
