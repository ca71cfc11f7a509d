"""Whether this machine has the C or C++ compiler that a kernel library calls at its first compilation."""

from __future__ import annotations

from functools import lru_cache

from attn_select.backends.spec import Reason
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment


@lru_cache(maxsize=64)
def _found(names: tuple[str, ...], path: str | None) -> bool:
    import shutil  # only a local device asks

    return any(shutil.which(name, path=path) is not None for name in names)


def compiler_reason(
    device: Device, environment: Environment, variable: str, names: tuple[str, ...], purpose: str
) -> Reason | None:
    """Return the reason ``compiler-missing``; None where a compiler is there or the device is only asked about.

    A plugin that calls it declares ``variable`` and ``PATH`` in ``BackendSpec.variables``.

    Args:
        variable: environment variable that names a compiler, with its options: ``CC``.
        names: compilers that are taken where it is unset, e.g. ``("gcc", "clang")``.
        purpose: what the library wants it for, in words: ``to compile with``.
    """
    if environment.assume_installed or not device.local:
        return None
    variables = environment.variables
    wanted = names
    if chosen := variables.get(variable):
        wanted = (chosen.split(" ", 1)[0],)
    if _found(wanted, variables.get("PATH")):
        return None
    message = f"no {' or '.join(wanted)} on PATH {purpose} (or name one in {variable})"
    return Reason("compiler-missing", message, None, list(wanted))
