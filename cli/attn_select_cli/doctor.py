"""``attn-select doctor``: what this machine has, what works and what to do about the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click

from attn_select_cli.help import Command

if TYPE_CHECKING:
    from attn_select.backends.registry import Registry
    from attn_select.backends.spec import BackendSpec
    from attn_select.machine.device import Device
    from attn_select.machine.environment import Environment
    from attn_select_cli.table import Block

EPILOG = """\b
Examples:
  attn-select doctor
  attn-select doctor --no-import
  attn-select doctor --json

Exit code: 0 no problems, 1 a plugin, a rules file or an installed library is broken, or no backend can run here.
"""
IMPORT_SECONDS = 120  # That a library may take to be imported
# Variables beside ATTN_SELECT_* that change what attn-select does. Specs declare the variables that plans read.
EFFECTIVE = {
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


@click.command("doctor", cls=Command, epilog=EPILOG, short_help="What this machine has, what works, what to do.")
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

    from attn_select import __version__
    from attn_select.backends.registry import load_plugins
    from attn_select.machine import detection
    from attn_select.machine.amx import avoid_trapping_amx
    from attn_select.machine.environment import Environment, installed_version
    from attn_select.rules.document import problem_text
    from attn_select.rules.layers import inspect_layers
    from attn_select_cli.rules import rules_errors

    found = detection.detect_device()
    registry, environment = load_plugins(), Environment()
    problems = list(registry.warnings)
    runnable = [name for name, spec in registry.specs.items() if can_run(spec, found.device, environment)]
    if not runnable:
        problems.append(f"no backend can run on this machine: {_way_out(registry, found.device, environment)}")
    libraries, of_libraries = _libraries(registry, environment, do_import)
    problems += of_libraries
    problems += map(problem_text, rules_errors()[1])
    return {
        "attn_select": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "amx": avoid_trapping_amx(say=lambda _: None, try_it=do_import),
        "torch": installed_version("torch"),
        "driver": found.driver_version,
        "cuda_driver": found.cuda_driver_version,
        "device": found.device.to_dict(),
        "device_notes": [*([found.note] if found.note else []), *found.warnings],
        "plugins": [plugin.to_dict() for plugin in registry.plugins],
        "runnable_backends": runnable,
        "libraries": libraries,
        "rules_files": [layer.to_dict() for layer in inspect_layers()],
        "variables": {
            name: {"value": os.environ.get(name), "effect": text} for name, text in _effective(registry).items()
        },
        "variables_without_effect": {
            name: {"value": os.environ[name], "instead": text} for name, text in _without_effect().items()
        },
        "problems": problems,
    }


def _libraries(
    registry: Registry, environment: Environment, do_import: bool
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return what is known of each library that a backend may need, by distribution, and what is wrong with them."""
    from attn_select_cli.backends import gpu_libraries

    needed = [(spec.name, group) for spec in registry.specs.values() for group in spec.libraries]
    found, problems, gpu_only = dict[str, dict[str, Any]](), list[str](), gpu_libraries(registry)
    for name in sorted({library.distribution for _, group in needed for library in group}):
        mine = [(user, group, each) for user, group in needed for each in group if each.distribution == name]
        states = [environment.state(library) for _, _, library in mine]
        state = "installed" if "installed" in states else states[-1]
        version, module = environment.version(name), mine[0][2].module
        # A bound that one backend has serves all.
        install = ([library for _, _, library in mine if "<" in library.version] or [mine[0][2]])[-1].install
        error = import_error(module) if do_import and state == "installed" else None
        if error:
            problems.append(f"{name} {version or ''} does not import: {error}")
        if state not in ("installed", "missing"):
            shown = version or "of unknown version (no package metadata)"
            problems.append(f"{name} {shown} cannot be used ({state}): {install}")
        unserved = [
            f"{user} ({library.version})"
            for (user, group, library), own in zip(mine, states, strict=True)
            if state == "installed" and own == "wrong-version" and environment.first(group) is None
        ]
        if unserved:
            problems.append(f"{name} {version} does not serve {', '.join(dict.fromkeys(unserved))}: {install}")
        found[name] = {
            "module": module,
            "needed_by": [*dict.fromkeys(user for user, _, _ in mine)],
            "needs_gpu": name in gpu_only,
            "version": version,
            "state": state,
            "install": install,
            "import_error": error,
        }
    return found, problems


def can_run(spec: BackendSpec, device: Device, environment: Environment) -> bool:
    """Whether a backend supports the device in some phase and has every library that it needs."""
    return supports(spec, device) and all(environment.first(group) is not None for group in spec.libraries)


def supports(spec: BackendSpec, device: Device) -> bool:
    """Whether a backend supports the device in some phase, whatever is installed."""
    return any(
        capabilities.compute_capabilities.value.accepts(device.compute_capability)
        for capabilities in spec.capabilities.values()
    )


def _way_out(registry: Registry, device: Device, environment: Environment) -> str:
    """Say what to install, or which plugin to repair, where no backend can run."""
    from attn_select.backends import distributions
    from attn_select.decide.situation import absent_backends

    wanted: dict[str, list[str]] = {}
    for name, spec in registry.specs.items():
        if supports(spec, device):
            missing = [group[0].install for group in spec.libraries if environment.first(group) is None]
            wanted.setdefault(" && ".join(missing), []).append(name)
    if wanted:
        return "; ".join(f"{', '.join(names)}: {command}" for command, names in wanted.items())
    plugin, absent = distributions.known_backends()["TORCH_SDPA"], absent_backends(registry).get("TORCH_SDPA")
    if absent is not None and absent.code != "plugin-not-installed":
        return f"{plugin} serves CPUs and GPUs, and TORCH_SDPA is not usable: {absent.message}"
    note = "" if distributions.folder_in_clone(plugin) else f". {distributions.NOT_ON_AN_INDEX}"
    return f"{plugin} serves CPUs and GPUs: {distributions.install_command(plugin)}{note}"


def _effective(registry: Registry) -> dict[str, str]:
    """Return what has an effect, by variable: all of attn-select's own, and the others that are set."""
    from attn_select.machine import variables

    others = EFFECTIVE | {name: f"read by {', '.join(users)}" for name, users in registry.variables.items()}
    return variables.EFFECTS | {name: text for name, text in others.items() if name in os.environ}


def _without_effect() -> dict[str, str]:
    """Return what to use instead of each variable that is set and has no effect here."""
    from attn_select.errors import UnknownNameError
    from attn_select.machine import variables

    unknown = [name for name in os.environ if name.startswith("ATTN_SELECT_") and name not in variables.EFFECTS]
    hints = {name: UnknownNameError("variable", name, variables.EFFECTS).hint or "" for name in sorted(unknown)}
    return hints | {name: text for name, text in WITHOUT_EFFECT.items() if name in os.environ}


def import_error(module: str) -> str | None:
    """Import a module in a process of its own (a broken extension may crash it)."""
    from attn_select.machine.interpreter import interpreter

    try:
        done = subprocess.run(
            interpreter(f"import {module}"), capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"took longer than {IMPORT_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the process ended with code {done.returncode}"


def _lines(findings: dict[str, Any]) -> list[Block]:
    from attn_select.backends import distributions
    from attn_select.decide.lines import HANG
    from attn_select.errors import shorten
    from attn_select.machine.amx import DESCRIPTIONS
    from attn_select_cli.table import Table, plugin_table

    device = findings["device"]
    rows = [
        ["attn-select", findings["attn_select"]],
        ["Python", findings["python"]],
        ["platform", findings["platform"]],
        ["AMX", DESCRIPTIONS[findings["amx"]]],
        ["torch", findings["torch"] or "not installed: pip install torch numpy"],
        ["NVIDIA driver", findings["driver"] or "none"],
        ["CUDA of the driver", findings["cuda_driver"] or "none"],
        ["device", f"{device['full_name']} ({device['compute_capability']})"],
    ]
    blocks: list[Block] = [[(label.ljust(20), "dim"), HANG, (text, "")] for label, text in rows]
    blocks += [[(" " * 20, ""), HANG, (note, "warning")] for note in findings["device_notes"]]
    runnable = ", ".join(findings["runnable_backends"]) or "none"
    blocks.append([("can run here".ljust(20), "dim"), HANG, (runnable, "")])
    blocks += [[], plugin_table(findings["plugins"])]
    libraries = []
    for name, x in findings["libraries"].items():
        state = f"does not import: {x['import_error']}" if x["import_error"] else x["state"]
        wanted = "" if x["state"] == "installed" else x["install"]
        if wanted and x["needs_gpu"]:
            wanted += f" ({distributions.NEEDS_GPU})"
        libraries.append([name, x["version"] or "-", state, wanted, ", ".join(x["needed_by"])])
    if libraries:
        blocks += [[], Table(["library", "version", "state", "to get it", "used by"], libraries)]
    files = [[x["kind"], x["state"], x["path"]] for x in findings["rules_files"]]
    blocks += [[], Table(["rules", "state", "path"], files)]
    for title, key, column in (
        ("variable", "variables", "effect"),
        ("variable without effect here", "variables_without_effect", "instead"),
    ):
        if findings[key]:
            values = [[name, shorten(x["value"] or "not set", 40), x[column]] for name, x in findings[key].items()]
            blocks += [[], Table([title, "value", column], values)]
    blocks.append([])
    blocks += [[("problem: ", "rejected"), HANG, (text, "")] for text in findings["problems"]]
    if not findings["problems"]:
        blocks.append([("no problems found", "selected")])
    return blocks
