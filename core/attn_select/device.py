"""Devices: what a GPU (or the CPU) is, looked up by name from a data file.

``attn_select.detection`` finds the device of this machine.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from attn_select.errors import ConfigError, UnknownNameError, shorten


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU model, or the CPU.

    Attributes:
        name: canonical lower-case name (``h100``, ``sm90``, ``cpu``), what ``when = { gpu = … }`` matches.
        compute_capability: ``(major, minor)``; None for a CPU.
        full_name: as the driver or the vendor's data sheet spells it.
        sm_count: streaming multiprocessors, None where unknown (``sm90``, CPU).
        memory_gib: device memory in GiB, None where unknown.
        bandwidth_gbps: peak memory bandwidth in GB/s (10^9 bytes), None where unknown.
        local: this machine's own device; False for one that is only asked about.
        source: where the figures come from.
    """

    name: str
    compute_capability: tuple[int, int] | None
    full_name: str = ""
    sm_count: int | None = None
    memory_gib: float | None = None
    bandwidth_gbps: float | None = None
    local: bool = False
    source: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether this is the CPU."""
        return self.compute_capability is None

    @property
    def capability_text(self) -> str:
        """``9.0``, or ``cpu``."""
        return "cpu" if self.compute_capability is None else "{}.{}".format(*self.compute_capability)

    def to_dict(self) -> dict[str, Any]:
        """Return the ``device`` object of the JSON output."""
        return {
            "name": self.name,
            "full_name": self.full_name,
            "compute_capability": self.capability_text,
            "sm_count": self.sm_count,
            "memory_gib": self.memory_gib,
            "bandwidth_gbps": self.bandwidth_gbps,
            "local": self.local,
            "source": self.source,
        }


CPU = Device("cpu", None, full_name="CPU of this machine", local=True, source="this machine")


@functools.cache
def known_gpus() -> dict[str, Device]:
    """Return every GPU of the data file by canonical name, in the file's order."""
    return {name: device for name, device, _ in _table()}


@functools.cache
def _table() -> tuple[tuple[str, Device, tuple[str, ...]], ...]:
    rows = json.loads(resources.files("attn_select").joinpath("data/gpus.json").read_text("utf-8"))["gpus"]
    return tuple(
        (
            row["name"],
            Device(
                name=row["name"],
                compute_capability=(row["compute_capability"][0], row["compute_capability"][1]),
                full_name=row["full_name"],
                sm_count=row["sm_count"],
                memory_gib=row["memory_gib"],
                bandwidth_gbps=row["bandwidth_gbps"],
                source=row["source"],
            ),
            tuple(row["aliases"]),
        )
        for row in rows
    )


def _fold(name: str) -> str:
    return re.sub(r"[\s_\-]+", "", name.casefold()).removeprefix("nvidia").removeprefix("geforce")


@functools.cache
def _by_folded_name() -> dict[str, Device]:
    names: dict[str, Device] = {}
    for name, device, aliases in _table():
        for spelling in (name, device.full_name, *aliases):
            names.setdefault(_fold(spelling), device)
    return names


def find_gpu(name: str) -> Device | None:
    """Return the GPU that ``name`` (a data-file name, alias or driver name) means, or None."""
    return _by_folded_name().get(_fold(name))


def lookup(name: str) -> Device:
    """Return the device that a user means by ``h100``, ``rtx 4090``, ``sm90``, ``sm_90a``, ``9.0`` or ``cpu``.

    Raises:
        UnknownNameError: no such GPU; lists the nearest names.
        ConfigError: a compute capability that no CUDA GPU has (below 5.0, above 12.x).
    """
    text = name.strip()
    if text.casefold() == "cpu":
        return CPU
    if (found := find_gpu(text)) is not None:
        return found
    if match := re.fullmatch(r"(?:sm_?(\d{1,2})(\d)[af]?)|(?:(\d{1,2})\.(\d))", text.casefold()):
        major, minor = (int(g) for g in match.groups() if g is not None)
        if not 5 <= major <= 12 or major == 11 and minor > 0:
            raise ConfigError(
                f"gpu = {shorten(name)!r}: no CUDA GPU has compute capability {major}.{minor}",
                fields=["gpu"],
                hint="write it as sm90 or 9.0; `attn-select gpus` lists the known GPUs",
            )
        return Device(f"sm{major}{minor}", (major, minor), full_name=f"any GPU of compute capability {major}.{minor}")
    raise UnknownNameError("gpu", name, [*known_gpus(), "cpu", "auto"], hint=_hint(text))


def _hint(text: str) -> str | None:
    from attn_select.errors import nearest

    near = nearest(text, [*known_gpus(), "cpu"])
    listing = "`attn-select gpus` lists all; sm90 or 9.0 names a compute capability"
    return f"did you mean {' or '.join(near)}? {listing}" if near else listing


def local_device(device: Device) -> Device:
    """Return ``device`` marked as this machine's own."""
    return replace(device, local=True)
