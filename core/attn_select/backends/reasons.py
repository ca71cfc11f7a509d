"""Reasons that more than the gate gives: a value that is not supported, a block size, a library that is not here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_select.backends.spec import BackendSpec, ComputeCapabilities, Library, Reason
from attn_select.layer.features import Feature
from attn_select.machine.device import Device
from attn_select.machine.environment import BROKEN, WRONG_VERSION, Environment

MLA_ONLY = Reason("mla-only", "serves MLA layers only", "no MLA dims", "MLA")
MLA_UNSUPPORTED = Reason("mla-unsupported", "serves no MLA layers", "MLA", "MHA, GQA, MQA")
SPARSE_ONLY = Reason("sparse-only", "serves sparse MLA only", "dense MLA", "sparse MLA (sparse_top_k)")


def unsupported(code: str, what: str, observed: Any, supported: Any, remedy: str | None = None) -> Reason:
    """Return the reason ``WHAT OBSERVED (supported: SUPPORTED)``; ``supported`` is a list of values, or words."""
    accepted = ", ".join(map(str, supported)) if isinstance(supported, list) else supported
    return Reason(code, f"{what} {observed} (supported: {accepted or 'none'})", observed, supported, remedy)


def block_size_reason(size: int, kernel_sizes: Sequence[int]) -> Reason:
    """Return the reason against a block size of which no kernel block size (tokens) is a divisor."""
    least = min(-(-size // kernel) * kernel for kernel in kernel_sizes)
    supported = "multiples of " + " or ".join(str(k) for k in kernel_sizes)
    return unsupported("block-size", "block size", size, supported, f"--block-size {least}")


def refusal(feature: Feature, value: Any, declared: Any) -> Reason:
    """Return the reason against a backend whose fact ``declared`` does not accept this value of a feature."""
    if declared is False and feature.off in (None, False):
        text = f"no {feature.what}" if value is True else f"no {feature.what} (asked for {value})"
        return Reason(feature.code, text, value, False)
    supported, nearest = feature.off, feature.off
    if isinstance(declared, tuple):
        supported = [feature.off, *declared]
    elif declared is not False:
        supported, nearest = f"at most {declared}", declared
    return unsupported(feature.code, feature.what, value, supported, f"{feature.flag} {nearest}")


def device_reasons(accepted: ComputeCapabilities, device: Device) -> list[Reason]:
    """Return the reason against a device whose compute capability is not accepted, if there is one."""
    if accepted.accepts(device.compute_capability):
        return []
    what = "device" if device.compute_capability is None else "compute capability"
    return [unsupported("compute-capability", what, device.capability_text, str(accepted))]


def library_reasons(spec: BackendSpec, environment: Environment) -> list[Reason]:
    """Return one reason per group of alternative libraries of which none can be used."""
    return [
        library_reason(group, environment)
        for group in spec.libraries
        if not any(environment.has(library) for library in group)
    ]


def library_reason(group: Sequence[Library], environment: Environment) -> Reason:
    """Return the reason that none of several alternative libraries can be used; the remedy installs the first."""
    states = {library.distribution: environment.state(library) for library in group}
    code = "library-version" if WRONG_VERSION in states.values() else "library-missing"
    parts = []
    for library in group:
        state = states[library.distribution]
        if state == WRONG_VERSION:
            parts.append(f"{library.distribution} {environment.known_version(library)} (needs {library.version})")
        elif state == BROKEN:
            parts.append(f"{library.distribution} is installed but has no module {library.module}")
        else:
            parts.append(f"{library.distribution} is not installed")
    wanted = [library.distribution + library.version for library in group]
    return Reason(code, "; ".join(parts), states, wanted, install_command(group[0], environment))


def install_command(library: Library, environment: Environment) -> str:
    """Return the command that installs a library, or upgrades it where its version is not accepted."""
    if environment.state(library) == WRONG_VERSION and "--upgrade" not in library.install:
        return library.install.replace("pip install ", "pip install --upgrade ", 1)
    return library.install
