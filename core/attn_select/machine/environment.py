"""What is installed here: kernel libraries by distribution and top-level module, never imported.

For a device that one only asks about, every library counts as installed at an unknown version, unless
``--with NAME==VERSION`` says which.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from attn_select.errors import ConfigError, show

LibraryState = Literal["installed", "assumed", "missing", "wrong-version", "broken"]
INSTALLED: Final = "installed"
ASSUMED: Final = "assumed"
MISSING: Final = "missing"
WRONG_VERSION: Final = "wrong-version"
BROKEN: Final = "broken"


def canonical_distribution(name: str) -> str:
    """Return the PEP 503 form of a distribution name (``Flash_Attn`` → ``flash-attn``)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def parse_pins(pins: Iterable[str]) -> dict[str, str]:
    """Parse ``--with NAME==VERSION`` values into versions by canonical distribution name.

    Raises:
        ConfigError: a value that is not ``NAME==VERSION`` with a PEP 440 version, or two versions of one distribution.
    """
    result: dict[str, str] = {}
    for pin in pins:
        from packaging.version import InvalidVersion, Version  # most starts have no pin

        name, equals, text = pin.partition("==")
        try:
            if not equals or not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", name.strip()):
                raise InvalidVersion
            version = str(Version(text))
        except InvalidVersion:
            raise ConfigError(
                f"with = {show(pin)}: expected NAME==VERSION, one version and no range",
                fields=["with"],
                hint="e.g. --with flashinfer-python==0.6.14",
            ) from None
        name = canonical_distribution(name)
        if result.setdefault(name, version) != version:
            raise ConfigError(f"with: {name} is given twice, as {result[name]} and as {version}", fields=["with"])
    return result


@dataclass(frozen=True, slots=True)
class Library:
    """One way to get a kernel: a distribution that must be installed.

    ``version`` is a PEP 440 specifier (``>=0.6.0``) or empty; ``module`` is the top-level import name probed
    without importing; ``install`` is a command that was seen to work.
    """

    distribution: str
    module: str
    install: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Environment:
    """The libraries and variables that a decision rests on. Equal by value; treat the mappings as immutable.

    Attributes:
        assume_installed: True for a device that is only asked about.
        pins: versions given by ``--with``, by distribution name; they beat what is installed.
        variables: environment variables, of which a plan reads those that its spec declares. Empty unless given;
            ``attn_select.decide.selector.environment_for`` takes the declared ones from this process, and no others.
        cuda: the CUDA version to judge by (``13.0``), None where unknown.
    """

    assume_installed: bool = False
    pins: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    cuda: str | None = None
    _versions: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)
    _states: dict[Library, LibraryState] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        pins = {canonical_distribution(name): version for name, version in self.pins.items()}
        object.__setattr__(self, "pins", pins)
        object.__setattr__(self, "variables", dict(self.variables))

    def __hash__(self) -> int:
        pins, variables = frozenset(self.pins.items()), frozenset(self.variables.items())
        return hash((self.assume_installed, pins, variables, self.cuda))

    def version(self, distribution: str) -> str | None:
        """Return the known version of a distribution: pinned, else installed (local only), else None."""
        if distribution not in self._versions:
            name = canonical_distribution(distribution)
            found = self.pins.get(name)
            if found is None and not self.assume_installed:
                found = installed_version(name)
            self._versions[distribution] = found
        return self._versions[distribution]

    def known_version(self, library: Library) -> str:
        """Return a library's version for messages, or why none is known."""
        return self.version(library.distribution) or "of unknown version (no package metadata; --with says which)"

    def state(self, library: Library) -> LibraryState:
        """Return how a library stands here. Probed once, without importing it.

        ``installed``, ``assumed`` (asked about or pinned), ``missing``, ``wrong-version`` (also where the version is
        unknown and ``library`` names the versions it needs) or ``broken`` (metadata without the module).
        """
        if library not in self._states:
            self._states[library] = self._probe(library)
        return self._states[library]

    def has(self, library: Library) -> bool:
        """Whether ``library`` can be used: installed in an accepted version, or assumed to be."""
        return self.state(library) in (INSTALLED, ASSUMED)

    def first(self, libraries: Iterable[Library]) -> Library | None:
        """Return the first usable one of several alternatives, or None."""
        return next(filter(self.has, libraries), None)

    def _probe(self, library: Library) -> LibraryState:
        version = self.version(library.distribution)
        if version is None and self.assume_installed:
            return ASSUMED
        pinned = canonical_distribution(library.distribution) in self.pins
        if not (self.assume_installed or pinned) and not has_module(library.module):
            return MISSING if version is None else BROKEN
        # A module without metadata (built into a folder, or vendored) is usable as it is, at no known version.
        if library.version and (version is None or not version_matches(version, library.version)):
            return WRONG_VERSION
        return ASSUMED if self.assume_installed or pinned else INSTALLED


def version_matches(version: str, specifier: str) -> bool:
    """Whether ``version`` lies in the PEP 440 range ``specifier``, pre-releases included. False if malformed."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return False


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, None where it is not installed or its metadata is broken."""
    try:
        return name_and_version(importlib.metadata.distribution(distribution))[1]
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str | None, str | None]:
    """Return a distribution's name and version from its metadata; None for either that the metadata lacks.

    Reads the two lines directly: importlib.metadata would load the email parser and parse the whole description.
    """
    found: dict[str, str] = {}
    try:
        # The last one is an egg-info that is a file, not a folder.
        text = next(filter(None, map(distribution.read_text, ("METADATA", "PKG-INFO", ""))), "")
    except (OSError, ValueError):  # unreadable, or not UTF-8
        text = ""
    for line in text.splitlines():
        if not line:
            break  # the description follows
        key, _, value = line.partition(":")
        found.setdefault(key.lower(), value.strip())
    return found.get("name") or None, found.get("version") or None


def has_module(top_level: str) -> bool:
    """Whether a top-level module can be found, without importing anything. A bare folder does not count.

    A dotted name is cut at its first dot: looking for the rest would import the parent.
    """
    name = top_level.partition(".")[0]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError):  # a broken finder
        spec = None
    except ValueError:  # no name, or a module made by hand and put into sys.modules
        return sys.modules.get(name) is not None
    loader = None if spec is None else spec.loader
    return loader is not None and not isinstance(loader, importlib.machinery.NamespaceLoader)
