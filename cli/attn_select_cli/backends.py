"""``attn-select backends``: the registered backends, how to get missing ones, and the facts of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli import complete
from attn_select_cli.help import Command

if TYPE_CHECKING:
    from attn_select.backends.registry import Registry
    from attn_select.backends.spec import BackendSpec, Library
    from attn_select.machine.environment import Environment

EPILOG = """\b
Examples:
  attn-select backends
  attn-select backends FLASH_ATTN
  attn-select backends FLASHINFER --json
"""


@click.command("backends", cls=Command, epilog=EPILOG, short_help="All backends, or one with the source of each fact.")
@click.argument("name", required=False, type=complete.BackendName())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str | None, as_json: bool) -> int:
    """List all backends and plugins, or show one backend's capabilities with the source of each fact."""
    from attn_select.backends.registry import load_plugins
    from attn_select.machine.environment import Environment
    from attn_select.rules.lint import known_names
    from attn_select_cli.output import print_json, print_lines

    registry, environment = load_plugins(), Environment()
    names = known_names(registry) if name is None else [name]
    if as_json:
        listed = [backend_dict(n, registry, environment, facts=name is not None) for n in names]
        print_json(
            {"schema_version": 1, "backends": listed, "plugins": [plugin.to_dict() for plugin in registry.plugins]}
        )
    elif name is not None and names[0] in registry.specs:
        print_lines(_facts_lines(registry.specs[names[0]], registry, environment))
    else:
        print_lines(_overview_lines(names, registry, environment))
    return 0


def backend_dict(name: str, registry: Registry, environment: Environment, *, facts: bool) -> dict[str, Any]:
    """Return what ``--json`` says of one backend; with ``facts`` every capability and its source."""
    from attn_select.backends.distributions import known_backends
    from attn_select.decide.situation import absent_backends

    spec = registry.specs.get(name)
    if spec is None:
        absent = absent_backends(registry)[name]
        distributions = list(registry.conflicts.get(name) or [known_backends()[name]])
        state, remedy = absent.code, absent.remedy
        return {"name": name, "state": state, "distributions": distributions, "missing": [], "remedy": remedy}
    missing = _missing(name, registry, environment)
    result: dict[str, Any] = {
        "name": name,
        "state": "libraries-missing" if missing else "ready",
        "distributions": [registry.owners[name]],
        "summary": spec.summary,
        "phases": list(spec.capabilities),
        "libraries": [
            [
                {
                    "distribution": x.distribution,
                    "state": environment.state(x),
                    "version": environment.version(x.distribution),
                }
                for x in group
            ]
            for group in spec.libraries
        ],
        "missing": [[library.distribution + library.version for library in group] for group in missing],
        "remedy": " && ".join(group[0].install for group in missing) or None,
    }
    if facts:
        result["capabilities"] = {phase: _capabilities(spec, phase) for phase in spec.capabilities}
        result["options"] = spec.options.model_json_schema().get("properties", {})
    return result


def _missing(name: str, registry: Registry, environment: Environment) -> list[Sequence[Library]]:
    """Return the groups of alternative libraries of which a backend has none; nothing for one not registered."""
    spec = registry.specs.get(name)
    return [] if spec is None else [group for group in spec.libraries if environment.first(group) is None]


def gpu_libraries(registry: Registry) -> set[str]:
    """Return the distributions that no backend for CPUs asks for: they are of use on a machine with a GPU alone."""
    by_use: dict[bool, set[str]] = {True: set(), False: set()}
    for spec in registry.specs.values():
        on_cpu = any(c.compute_capabilities.value.accepts(None) for c in spec.capabilities.values())
        by_use[on_cpu] |= {library.distribution for group in spec.libraries for library in group}
    return by_use[False] - by_use[True]


def _capabilities(spec: BackendSpec, phase: Any) -> dict[str, Any]:
    from dataclasses import fields

    from attn_select.backends.spec import Fact

    capabilities = spec.capabilities[phase]
    result: dict[str, Any] = {}
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        if isinstance(value, Fact):
            plain = list(value.value) if isinstance(value.value, tuple) else value.value
            plain = plain if isinstance(plain, (bool, int, list)) else str(plain)
            result[field.name] = {"value": plain, "source": value.source}
        else:
            result[field.name] = {"value": value, "source": None}
    return result


def _overview_lines(names: list[str], registry: Registry, environment: Environment) -> list[Any]:
    from attn_select.backends import distributions
    from attn_select.decide.lines import HANG
    from attn_select_cli.table import Table, plugin_table

    gpu_only = gpu_libraries(registry)
    rows = []
    for name in names:
        entry = backend_dict(name, registry, environment, facts=False)
        installed = [
            f"{library['distribution']} {library['version'] or ''}".strip()
            for group in entry.get("libraries", [])
            for library in group
            if library["state"] == "installed"
        ]
        phases = ", ".join(entry.get("phases", [])) or "-"
        remedy = entry["remedy"] or ""
        if any(
            library.distribution in gpu_only for group in _missing(name, registry, environment) for library in group
        ):
            remedy += f" ({distributions.NEEDS_GPU})"
        rows.append([name, entry["state"], phases, ", ".join(installed) or "-", remedy])
    lines: list[Any] = [
        Table(["backend", "on this machine", "phases", "libraries found", "to get what is missing"], rows)
    ]
    lines += [[], plugin_table([plugin.to_dict() for plugin in registry.plugins])]
    lines += [[], [("`attn-select backends NAME` shows one backend's capabilities with their sources.", "dim")]]
    wanted = [distributions.known_backends()[row[0]] for row in rows if row[1] == "plugin-not-installed"]
    if not all(distributions.folder_in_clone(distribution) for distribution in wanted):
        lines.append([("note: ", "warning"), HANG, (distributions.NOT_ON_AN_INDEX, "")])
    return lines


def _place(spec: BackendSpec, registry: Registry) -> str:
    """Return in words where a backend stands among the backends for the same kind of layers."""
    from attn_select.backends.distributions import known_backends
    from attn_select.backends.rank import by_rank

    sorts = {capabilities.sort for capabilities in spec.capabilities.values()}
    order = [
        name
        for name in by_rank(registry.specs, list(known_backends()))
        if sorts & {capabilities.sort for capabilities in registry.specs[name].capabilities.values()}
    ]
    place = order.index(spec.name)
    return f"behind {order[place - 1]}" if place else "first"


def _facts_lines(spec: BackendSpec, registry: Registry, environment: Environment) -> list[Any]:
    from attn_select_cli.table import Table

    owner = registry.owners[spec.name]

    lines: list[Any] = [[(spec.name, "title"), (f"  {spec.summary}", "")], [(f"registered by {owner}", "dim")]]
    for group in spec.libraries:
        states = [
            f"{x.distribution}{x.version} ({environment.version(x.distribution) or environment.state(x)})"
            for x in group
        ]
        lines.append([("needs ", "dim"), (" or ".join(states), "")])
    lines.append([("stands ", "dim"), (_place(spec, registry), ""), (" unless a rule says otherwise", "dim")])
    served = list(spec.capabilities)
    same = len(served) == 2 and spec.capabilities["prefill"] is spec.capabilities["decode"]
    for title, phase in [(", ".join(served), served[0])] if same else [(p, p) for p in served]:
        rows = []
        for field, fact in _capabilities(spec, phase).items():
            value = fact["value"]
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            if isinstance(value, bool):
                text = "yes" if value else "no"
            rows.append([field, text or "none", fact["source"] or ""])
        lines += [[], [(f"Capabilities in {title}", "title")], Table(["fact", "value", "source"], rows)]
    options = spec.options.model_json_schema().get("properties", {})
    if options:
        rows = [[name, str(o.get("default")), o.get("description", "")] for name, o in options.items()]
        lines += [
            [],
            [(f"Options in [backends.{spec.name}]", "title")],
            Table(["option", "default", "meaning"], rows),
        ]
    return lines
