"""The C or C++ compiler that inductor and Triton call at their first compilation, looked for on this machine only."""

from __future__ import annotations

from functools import lru_cache

from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.spec import Reason

COMPILER_VARIABLES = ("CC", "CXX", "PATH")
"""What ``compiler_reason`` reads of the environment."""


@lru_cache(maxsize=64)
def _found(names: tuple[str, ...], path: str | None) -> bool:
    import shutil  # only a local device asks

    return any(shutil.which(name, path=path) is not None for name in names)


def compiler_reason(device: Device, environment: Environment) -> Reason | None:
    """Return the reason against compiling here, or None: a compiler is there, or the device is only asked about.

    On a CPU inductor calls ``$CXX`` or g++ (torch/_inductor/config.py v2.13.0, ``cpp.cxx``), on a GPU Triton builds its
    driver module with ``$CC``, gcc or clang (triton/runtime/build.py v3.6.0).
    """
    if environment.assume_installed or not device.local:
        return None
    variables = environment.variables
    on_cpu = device.compute_capability is None
    variable = "CXX" if on_cpu else "CC"
    wanted: tuple[str, ...] = ("g++",) if on_cpu else ("gcc", "clang")
    if chosen := variables.get(variable):
        wanted = (chosen.split(" ", 1)[0],)
    if _found(wanted, variables.get("PATH")):
        return None
    message = f"no {' or '.join(wanted)} on PATH to compile with (or name one in {variable})"
    return Reason("compiler-missing", message, None, list(wanted))
