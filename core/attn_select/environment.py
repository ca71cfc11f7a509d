"""What is installed here: kernel libraries by distribution and top-level module, never imported.

For a device that one only asks about, every library counts as installed at an unknown version, unless
``--with NAME==VERSION`` says which.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attn_select.errors import ConfigError, shorten

if TYPE_CHECKING:
    from attn_select.spec import Library

LibraryState = str
INSTALLED = "installed"
ASSUMED = "assumed"
MISSING = "missing"
WRONG_VERSION = "wrong-version"
BROKEN = "broken"


def canonical_distribution(name: str) -> str:
    """Return the PEP 503 form of a distribution name (``Flash_Attn`` → ``flash-attn``)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def parse_pins(pins: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Parse ``--with NAME==VERSION`` values.

    Raises:
        ConfigError: a value that is not ``NAME==VERSION`` with a PEP 440 version.
    """
    from packaging.version import InvalidVersion, Version

    result = {}
    for pin in pins:
        name, equals, version = pin.partition("==")
        try:
            if not equals or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name.strip()):
                raise InvalidVersion
            result[canonical_distribution(name)] = str(Version(version.strip()))
        except InvalidVersion:
            raise ConfigError(
                f"with = {shorten(pin)!r}: expected NAME==VERSION", fields=["with"], hint="e.g. --with flashinfer-python==0.6.14"
            ) from None
    return result


@dataclass(slots=True)
class Environment:
    """The libraries and variables that a decision rests on.

    Attributes:
        assume_installed: True for a device that is only asked about.
        pins: versions given by ``--with``, by canonical distribution name; they beat what is installed.
        variables: the process's environment variables.
        cuda: CUDA version of the installed torch (``13.0``), None where unknown.
    """

    assume_installed: bool = False
    pins: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cuda: str | None = None
    _versions: dict[str, str | None] = field(default_factory=dict)
    _states: dict[Any, LibraryState] = field(default_factory=dict)

    def version(self, distribution: str) -> str | None:
        """Return the known version of a distribution: pinned, else installed (local only), else None."""
        try:
            return self._versions[distribution]
        except KeyError:
            pass
        name = canonical_distribution(distribution)
        found = self.pins.get(name)
        if found is None and not self.assume_installed:
            found = installed_version(name)
        self._versions[distribution] = found
        return found

    def state(self, library: Library) -> LibraryState:
        """Return ``installed``, ``assumed``, ``missing``, ``wrong-version`` or ``broken`` (metadata without a module)."""
        try:
            return self._states[library]
        except KeyError:
            pass
        state = self._states[library] = self._probe(library)
        return state

    def has(self, library: Library) -> bool:
        """Whether ``library`` can be used: installed in an accepted version, or assumed to be."""
        return self.state(library) in (INSTALLED, ASSUMED)

    def first(self, libraries: tuple[Library, ...]) -> Library | None:
        """Return the first usable one of several alternatives, or None."""
        for library in libraries:
            if self.has(library):
                return library
        return None

    def _probe(self, library: Library) -> LibraryState:
        version = self.version(library.distribution)
        if version is None:
            if self.assume_installed:
                return ASSUMED
            # Built from source into a folder, or vendored: a module without metadata is usable as it is.
            return INSTALLED if not library.version and has_module(library.module) else MISSING
        if library.version:
            from packaging.specifiers import SpecifierSet

            if not SpecifierSet(library.version).contains(version, prereleases=True):
                return WRONG_VERSION
        if self.assume_installed or canonical_distribution(library.distribution) in self.pins:
            return ASSUMED
        return INSTALLED if has_module(library.module) else BROKEN


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, None where it is not installed or its metadata is broken."""
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError, TypeError, KeyError):
        return None


def has_module(top_level: str) -> bool:
    """Whether a top-level module can be found, without importing it. A bare folder does not count."""
    try:
        spec = importlib.util.find_spec(top_level)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.loader is not None and not isinstance(spec.loader, importlib.machinery.NamespaceLoader)
