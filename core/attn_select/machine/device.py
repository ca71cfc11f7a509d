"""Devices: what a GPU (or the CPU) is, looked up by name from a data file.

``attn_select.machine.detection`` finds the device of this machine.
"""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import dataclass
from typing import Any

from attn_select.errors import ConfigError, UnknownNameError, nearest, shorten

_IN_JSON = (
    *("name", "full_name", "compute_capability", "arch", "sm_count", "memory_gib", "bandwidth_gbps", "local", "source"),
)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU model, or the CPU.

    Attributes:
        name: canonical lower-case name (``h100``, ``sm90``, ``cpu``), what ``when = { gpu = … }`` matches.
        compute_capability: ``(major, minor)`` of an NVIDIA GPU; None for AMD's and for a CPU.
        full_name: as the driver or the vendor's data sheet spells it.
        sm_count: streaming multiprocessors, AMD's compute units; None where unknown (``sm90``, CPU).
        memory_gib: device memory in GiB, None where unknown.
        bandwidth_gbps: peak memory bandwidth in GB/s (10^9 bytes), None where unknown.
        bf16_tflops: dense 16-bit matmul rate in 10^12 FLOP/s, None where unknown.
        fp8_tflops: dense FP8 matmul rate in 10^12 FLOP/s, None where unknown or absent.
        local: this machine's own device; False for one that is only asked about.
        source: where the figures come from.
        arch: LLVM's name of an AMD GPU's architecture (``gfx942``); None for NVIDIA's and for a CPU.
    """

    name: str
    compute_capability: tuple[int, int] | None
    full_name: str = ""
    sm_count: int | None = None
    memory_gib: float | None = None
    bandwidth_gbps: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    local: bool = False
    source: str = ""
    arch: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether this is the CPU."""
        return self.compute_capability is None and self.arch is None

    @property
    def capability_text(self) -> str:
        """``9.0``, ``gfx942``, or ``cpu``."""
        return self.arch or ("cpu" if self.compute_capability is None else "{}.{}".format(*self.compute_capability))

    def to_dict(self) -> dict[str, Any]:
        """Return the ``device`` object of the JSON output."""
        values = {name: getattr(self, name) for name in _IN_JSON}
        return {**values, "compute_capability": None if self.arch else self.capability_text}


CPU = Device("cpu", None, full_name="CPU of this machine", local=True, source="this machine")

_OF_AMD = re.compile(r"(amd|gfx|mi\d|instinct|radeon|rx[5-9]\d)")
_OF_OTHERS = re.compile(
    r"(intel|gaudi|arc[ab]\d|xpu|tpu|trainium|inferentia|ascend|"
    r"apple|mps|metal|m[1-9](pro|max|ultra)|m[1-5]$)"
)
_THIS_MACHINES = re.compile(r"(cuda|gpu)(:?\d+)?")

_SEPARATORS = {ord(c): None for c in " \t\r\n\f\v-_\N{NO-BREAK SPACE}"}
_CAPABILITY = re.compile(r"sm[ _-]?(\d{1,2})(\d)[af]?|(\d{1,2})\.(\d)[af]?", re.ASCII)


@functools.cache
def _data() -> dict[str, Any]:
    # A path, not importlib.resources: importing that takes longer than reading the file.
    with open(os.path.join(os.path.dirname(__file__), "gpus.json"), "rb") as file:
        found: dict[str, Any] = json.load(file)
    return found


@functools.cache
def known_gpus() -> dict[str, Device]:
    """Return every GPU of the data file by canonical name, in the file's order."""
    return {device.name: device for device, _ in _table()}


@functools.cache
def _table() -> tuple[tuple[Device, tuple[str, ...]], ...]:
    found = []
    for row in _data()["gpus"]:
        aliases, capability = row["aliases"], row["compute_capability"]
        figures = {name: value for name, value in row.items() if name != "aliases"}
        figures["compute_capability"] = tuple(capability) if capability else None
        found.append((Device(**figures), tuple(aliases)))
    return tuple(found)


def _fold(name: str) -> str:
    folded = name.casefold().translate(_SEPARATORS).removeprefix("nvidia").removeprefix("amd")
    for brand in ("geforce", "tesla", "grid", "instinct", "radeon"):
        if folded.startswith(brand):
            return folded[len(brand) :]
    return folded


@functools.cache
def _by_folded_name() -> dict[str, Device]:
    names: dict[str, Device] = {}
    for device, aliases in _table():
        for spelling in (device.name, device.full_name, *aliases):
            names.setdefault(_fold(spelling), device)
    return names


def find_gpu(name: str) -> Device | None:
    """Return the GPU that ``name`` (a data-file name, alias or driver name) means, or None."""
    return _by_folded_name().get(_fold(name))


def lookup(name: str) -> Device:
    """Return the device that a user means by ``h100``, ``RTX 4090``, ``sm90``, ``9.0``, ``gfx942`` or ``cpu``.

    Raises:
        UnknownNameError: no such GPU; lists the nearest names.
        ConfigError: a compute capability that no CUDA GPU has (9.1, 44.0).
    """
    text = name.strip()
    if text.casefold() == "cpu":
        return CPU
    if (found := find_gpu(text)) is not None:
        return found
    if match := _CAPABILITY.fullmatch(text.casefold()):
        major, minor = (int(group) for group in match.groups() if group is not None)
        return _any_gpu(name, major, minor)
    if (arch := text.casefold()) in _data()["amd"]:
        return Device(arch, None, full_name=f"any AMD GPU of {arch}", source="as asked for", arch=arch)
    listing = "`attn-select gpus` lists all; sm90 or 9.0 names a compute capability"
    near: list[str] = []
    if _OF_AMD.match(text.casefold().translate(_SEPARATORS)):
        near = [each for each in _nearest_names(text) if lookup(each).arch is not None]
        meant = f"did you mean {' or '.join(near)}? Else " if near else ""
        hint = f"{meant}write its architecture, which rocminfo shows ({', '.join(_data()['amd'])}); {listing}"
    elif _OF_OTHERS.match(_fold(text)):
        hint = f"only the GPUs of NVIDIA and AMD, and the CPU (--gpu cpu), are covered; {listing}"
    elif _THIS_MACHINES.fullmatch(_fold(text)):
        hint = f"auto is this machine's; {listing}"
    elif capabilities := _capabilities_of(text):
        names = " or ".join(f"sm{capability.replace('.', '')}" for capability in capabilities)
        hint = f"write its compute capability, {names}: no figures of it are known; `attn-select gpus` lists all others"
    else:
        near = _nearest_names(text)
        hint = f"did you mean {' or '.join(near)}? {listing}" if near else listing
    error = UnknownNameError("gpu", name, [*known_gpus(), "cpu", "auto"], hint=hint)
    error.nearest = near
    raise error


def _capabilities_of(name: str) -> list[str]:
    """Return the compute capabilities of an architecture, or of GPUs that the data file lacks; [] for other names."""
    folded = _fold(name)
    named = [each for name, each in _data()["architectures"].items() if folded == name.casefold()]
    named += [row["compute_capabilities"] for row in _data()["not_listed"] if re.fullmatch(row["pattern"], folded)]
    return named[0] if named else []


def _any_gpu(name: str, major: int, minor: int) -> Device:
    """Return the device that stands for all GPUs of a compute capability, for one that exists."""
    capability = f"{major}.{minor}"
    for architecture, capabilities in _data()["architectures"].items():
        if capability in capabilities:
            full_name = f"any GPU of compute capability {capability} ({architecture})"
            return Device(f"sm{major}{minor}", (major, minor), full_name=full_name, source="as asked for")
    known = ", ".join(sorted((c for each in _data()["architectures"].values() for c in each), key=float))
    raise ConfigError(
        f"gpu = {shorten(name)!r}: no CUDA GPU has compute capability {capability} (known: {known})",
        fields=["gpu"],
        hint="write it as sm90 or 9.0; `attn-select gpus` lists the known GPUs",
    )


def _nearest_names(text: str) -> list[str]:
    """Return up to three canonical names: first names that go on where ``text`` ends, then names that look like it."""
    spellings, folded = {**_by_folded_name(), "cpu": CPU}, _fold(text)
    if len(folded) < 3:  # too short to look like anything
        return []
    longer = [spelling for spelling in spellings if spelling.startswith(folded)]
    near = [*longer, *nearest(folded, spellings, limit=6)]
    return list(dict.fromkeys(spellings[spelling].name for spelling in near))[:3]
