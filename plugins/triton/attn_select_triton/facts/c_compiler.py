"""The C compiler with which Triton builds its driver module, looked for on this machine only."""

from __future__ import annotations

from functools import lru_cache

from attn_select.device import Device
from attn_select.environment import Environment
from attn_select.spec import Reason

COMPILER_VARIABLES = ("CC", "PATH")
"""What ``compiler_reason`` reads of the environment."""


@lru_cache(maxsize=64)
def _found(names: tuple[str, ...], path: str | None) -> bool:
    import shutil  # only a local device asks

    return any(shutil.which(name, path=path) is not None for name in names)


def compiler_reason(device: Device, environment: Environment) -> Reason | None:
    """Return the reason against compiling here, or None: a compiler is there, or the device is only asked about.

    Triton takes ``$CC``, gcc or clang (triton-lang/triton python/triton/runtime/build.py v3.6.0).
    """
    if environment.assume_installed or not device.local:
        return None
    variables = environment.variables
    wanted: tuple[str, ...] = ("gcc", "clang")
    if chosen := variables.get("CC"):
        wanted = (chosen.split(" ", 1)[0],)
    if _found(wanted, variables.get("PATH")):
        return None
    message = f"no {' or '.join(wanted)} on PATH for Triton to build its driver with (or name one in CC)"
    return Reason("compiler-missing", message, None, list(wanted))
