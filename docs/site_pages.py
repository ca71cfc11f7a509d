"""Makes the pages of the site that nobody writes by hand: the overview and the reference. mkdocs runs this file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mkdocs_gen_files

from attn_select.backends.registry import load_plugins
from attn_select.machine.environment import Environment
from attn_select.rules.schema import rules_schema
from attn_select_cli.backends import backend_dict

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "Selection": (
        "decide.selector",
        "layer.config",
        "decide.selection",
        "decide.outcome",
        "machine.device",
        "machine.environment",
        "layer.models",
        "errors",
    ),
    "Workloads and times": ("times.batch_shape", "times.workload", "times.prediction", "times.evidence"),
    "Plugins": ("backends.spec", "layer.layouts", "backends.hookspecs", "backends.kernel_builds"),
    "Runtime": (
        "runtime.group",
        "runtime.layer_group",
        "runtime.mla_group",
        "runtime.attention",
        "runtime.mla_attention",
        "runtime.batch",
        "runtime.metadata",
        "runtime.block_pool",
        "runtime.kv_cache",
        "runtime.cuda_graph",
        "runtime.backend",
        "runtime.ops",
        "runtime.scales",
    ),
    "Testing a plugin": ("testing.conformance", "testing.toolkit"),
}
"""The public modules of ``attn_select``, by what they are for."""


def write(name: str, lines: Iterable[str]) -> None:
    with mkdocs_gen_files.open(name, "w") as page:
        page.write("\n".join(lines) + "\n")


def python() -> Iterable[str]:
    yield "# Python\n"
    for title, modules in MODULES.items():
        yield f"## {title}\n"
        for module in modules:
            yield f"::: attn_select.{module}\n    options:\n      heading_level: 3\n"


def command_line() -> Iterable[str]:
    yield "::: mkdocs-click\n    :module: attn_select_cli.main\n    :command: cli\n    :prog_name: attn-select"
    yield "    :style: table\n    :list_subcommands: true\n"


def backends() -> Iterable[str]:
    registry = load_plugins()
    yield "# Backends and their facts\n"
    yield "`attn-select backends NAME` prints the same. A fact of source `unverified` marks the plans that use it.\n"
    for name in sorted(registry.specs):
        found = backend_dict(name, registry, Environment(), facts=True)
        yield f"## {name}\n\n{cell(found['summary'])}. Of `{found['distributions'][0]}`.\n"
        phases = found["capabilities"]
        same = len({json.dumps(facts) for facts in phases.values()}) == 1
        for phase in list(phases)[:1] if same else phases:
            yield f"### {' and '.join(phases) if same else phase} {{: #{name.lower()}-{phase} }}\n"
            yield "| fact | value | source |\n| --- | --- | --- |"
            for fact, told in phases[phase].items():
                yield f"| `{fact}` | {cell(told['value'])} | {cell(told['source'])} |"
            yield ""
        if found["options"]:
            yield f"### Options in `[backends.{name}]` {{: #{name.lower()}-options }}\n"
            yield "| option | default | meaning |\n| --- | --- | --- |"
            for option, told in found["options"].items():
                yield f"| `{option}` | {cell(told.get('default'))} | {cell(told.get('description'))} |"
            yield ""


def cell(value: Any) -> str:
    """Return a value as the text of a table's cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def schema() -> Iterable[str]:
    yield "# Rules schema\n\nThe JSON Schema of rules files, for editors that complete and check TOML.\n"
    yield f"```json\n{json.dumps(rules_schema(load_plugins()), indent=2)}\n```"


write("index.md", [(ROOT / "README.md").read_text("utf-8")])
write("reference/python.md", python())
write("reference/cli.md", command_line())
write("reference/backends.md", backends())
write("reference/rules-schema.md", schema())
