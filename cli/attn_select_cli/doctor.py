"""``attn-select doctor``: what this machine has, what works and what to do about the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import click

EPILOG = """\b
Examples:
  attn-select doctor
  attn-select doctor --no-import
  attn-select doctor --json

Exit code: 0 nothing is broken, 1 a plugin, a rules file or an installed library is.
"""
# Variables that change what attn-select does; those that plans read are declared by their specs.
EFFECTIVE = {
    "ATTN_SELECT_RULES": "rules files above the user's, below --rules",
    "ATTN_SELECT_TRACEBACK": "internal errors end in a traceback",
    "CUDA_VISIBLE_DEVICES": "which GPU is this machine's",
    "CUDA_DEVICE_ORDER": "how CUDA_VISIBLE_DEVICES counts",
    "NO_COLOR": "no colours",
}
# Variables of engines that people try here; each with what to use instead.
WITHOUT_EFFECT = {
    "VLLM_ATTENTION_BACKEND": "--backend NAME, select(backend=…) or a rule",
    "VLLM_FLASH_ATTN_VERSION": "option version of [backends.FLASH_ATTN] in a rules file",
    "VLLM_USE_TRTLLM_ATTENTION": "option use_trtllm of [backends.FLASHINFER] in a rules file",
    "VLLM_USE_FLASHINFER": "--backend FLASHINFER or a rule",
    "VLLM_BATCH_INVARIANT": "--batch-invariant or AttentionConfig(batch_invariant=True)",
    "VLLM_KV_CACHE_LAYOUT": "the plan's kv_layout follows from the selected backends",
    "SGLANG_ATTENTION_BACKEND": "--backend NAME, select(backend=…) or a rule",
}


@click.command("doctor", epilog=EPILOG)
@click.option(
    "--import/--no-import",
    "do_import",
    default=True,
    help="Import each kernel library in a process of its own (seconds each).",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(do_import: bool, as_json: bool) -> int:
    """Check Python, torch, driver, GPU, plugins, kernel libraries, rules files and environment variables."""
    from attn_select_cli.output import print_json, print_lines

    findings = examine(do_import)
    if as_json:
        print_json({"schema_version": 1, **findings})
    else:
        print_lines(_lines(findings))
    return 1 if findings["problems"] else 0


def examine(do_import: bool) -> dict[str, Any]:
    """Collect everything that the command prints, as data."""
    import platform

    from attn_select import __version__, detection
    from attn_select.environment import Environment, installed_version
    from attn_select.registry import load_plugins
    from attn_select.rules.layers import inspect_layers
    from attn_select_cli.rules import rules_errors

    found = detection.detect_device()
    registry, environment = load_plugins(), Environment()
    libraries: dict[str, dict[str, Any]] = {}
    unserved: dict[str, list[str]] = {}  # by distribution, backends that need another version of it
    for spec in registry.specs.values():
        for group in spec.libraries:
            for library in group:
                entry = libraries.setdefault(library.distribution, {"module": library.module, "needed_by": []})
                entry["version"] = environment.version(library.distribution)
                if spec.name not in entry["needed_by"]:
                    entry["needed_by"].append(spec.name)
                state = environment.state(library)
                if entry.get("state") != "installed":
                    entry["state"] = state
                if "<" in library.version or "install" not in entry:  # a bound that one backend has serves all
                    entry["install"] = library.install
                if state == "wrong-version" and environment.first(group) is None:
                    unserved.setdefault(library.distribution, []).append(f"{spec.name} ({library.version})")
    problems = list(registry.warnings)
    if not registry.specs:
        problems.append("no plugin is installed, so nothing can be selected: pip install ./plugins/torch in a clone")
    for name, entry in sorted(libraries.items()):
        entry["import_error"] = None
        if entry["state"] == "installed" and do_import:
            entry["import_error"] = import_error(entry["module"])
            if entry["import_error"]:
                problems.append(f"{name} {entry['version'] or ''} does not import: {entry['import_error']}")
        if entry["state"] == "installed" and name in unserved:
            backends = ", ".join(dict.fromkeys(unserved[name]))
            problems.append(f"{name} {entry['version']} does not serve {backends}: {entry['install']}")
        if entry["state"] not in ("installed", "missing"):
            version = entry["version"] or "of unknown version (no package metadata)"
            problems.append(f"{name} {version} cannot be used ({entry['state']}): {entry['install']}")
    effective = EFFECTIVE | {name: f"read by {', '.join(users)}" for name, users in registry.variables.items()}
    layers = inspect_layers()
    problems += [f"{file}:{line}: {text}" if line else f"{file}: {text}" for file, line, text in rules_errors()[1]]
    return {
        "attn_select": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "torch": installed_version("torch"),
        "driver": found.driver_version,
        "cuda_driver": found.cuda_driver_version,
        "device": found.device.to_dict(),
        "device_notes": [*([found.note] if found.note else []), *found.warnings],
        "plugins": [plugin.to_dict() for plugin in registry.plugins],
        "libraries": dict(sorted(libraries.items())),
        "rules_files": [layer.to_dict() for layer in layers],
        "variables": {
            name: {"value": os.environ[name], "effect": text} for name, text in effective.items() if name in os.environ
        },
        "variables_without_effect": {
            name: {"value": os.environ[name], "instead": text}
            for name, text in WITHOUT_EFFECT.items()
            if name in os.environ
        },
        "problems": problems,
    }


def import_error(module: str, timeout: float = 120.0) -> str | None:
    """Import a module in a process of its own (a broken extension may crash it).

    Return its error's last line, None if it works.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with code {done.returncode}"


def _lines(findings: dict[str, Any]) -> list[Any]:
    from attn_select.errors import shorten
    from attn_select_cli.output import plugin_lines, table_lines

    device = findings["device"]
    rows = [
        ["attn-select", findings["attn_select"]],
        ["Python", findings["python"]],
        ["platform", findings["platform"]],
        ["torch", findings["torch"] or "not installed: pip install torch"],
        ["NVIDIA driver", findings["driver"] or "none"],
        ["CUDA of the driver", findings["cuda_driver"] or "none"],
        ["device", f"{device['full_name']} ({device['compute_capability']})"],
    ]
    lines: list[Any] = [[(label.ljust(20), "dim"), (text, "")] for label, text in rows]
    lines += [[(" " * 20, ""), (note, "warning")] for note in findings["device_notes"]]
    lines += [[], *plugin_lines(findings["plugins"])]
    libraries = []
    for name, x in findings["libraries"].items():
        state = f"does not import: {x['import_error']}" if x["import_error"] else x["state"]
        wanted = "" if x["state"] == "installed" else x["install"]
        libraries.append([name, x["version"] or "-", state, wanted, ", ".join(x["needed_by"])])
    if libraries:
        lines += [[], *table_lines(["library", "version", "state", "to get it", "used by"], libraries)]
    files = [[x["kind"], x["state"], x["path"]] for x in findings["rules_files"]]
    lines += [[], *table_lines(["rules", "state", "path"], files)]
    for title, key, column in (
        ("variable", "variables", "effect"),
        ("variable without effect here", "variables_without_effect", "instead"),
    ):
        if findings[key]:
            found = [[n, shorten(v["value"], 40), v[column]] for n, v in findings[key].items()]
            lines += [[], *table_lines([title, "value", column], found)]
    problems = [[("problem: ", "rejected"), (text, "")] for text in findings["problems"]]
    return [*lines, [], *(problems or [[("no problems found", "selected")]])]
