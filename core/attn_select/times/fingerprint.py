"""What a backend's times are of: the release of its kernel library, or a hash of its own kernels and schedules.

A time is evidence for the kernel that was measured and for no other one. So each time carries a fingerprint, and a time
whose fingerprint differs from the present one is stale.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attn_select.backends.spec import BackendSpec
from attn_select.machine.environment import Environment

COMPILERS = ("torch", "triton")
"""Distributions that compile or hold kernels for everyone. A backend that needs no other one runs its plugin's own."""
ALIKE = Path(__file__).parent / "surveys" / "alike.toml"
"""Which releases of a library were measured to be alike, with reason and date."""
SOURCES = "sources"
"""The part of a fingerprint that is a hash."""
_WITHOUT_TIME = (".facts", ".plugin")
"""Parts of a plugin that name kernels, and run none: a record names the kernel beside its fingerprint."""
_TOKEN = re.compile(
    r"""["'#](?:(?<=\#)[^\n]*|(?<=")""[\s\S]*?(?<!\\)\"{3}|(?<=')''[\s\S]*?(?<!\\)'{3}"""
    r"""|(?<=")(?:\\.|[^"\\\n])*"|(?<=')(?:\\.|[^'\\\n])*')"""
)
"""A comment, or a string, in which nothing begins a comment."""
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([A-Za-z_][\w.]*)(?:[ \t]+import[ \t]+(\([^)]*\)|[^\n]*))?", re.M)
_DATA_FILE = re.compile(r"""["']([\w-]+\.(?:toml|json))["']""")

Fingerprint = Mapping[str, str]
"""The version of each distribution that a kernel comes from: a release, with ``COMPILERS`` major and minor alone, or
``sources`` and a hash for a plugin's own kernels."""


def fingerprint(spec: BackendSpec, environment: Environment, provider: str | None = None) -> dict[str, str]:
    """Return the fingerprint of a backend's kernels as they are here."""
    libraries = [library.distribution for group in spec.libraries for library in group]
    found: dict[str, str] = {}
    if all(name in COMPILERS for name in libraries):
        found[SOURCES] = sources_hash(spec.load.partition(":")[0])
        # Triton compiles kernels written in it, torch brings those of its own operators.
        names = ["triton" if "triton" in libraries else "torch"]
    elif provider is not None:
        names = [provider.partition(" ")[0]]
    else:
        groups = [[each for each in group if each.distribution not in COMPILERS] for group in spec.libraries]
        names = [first.distribution for group in groups if (first := environment.first(group)) is not None]
    return found | _versions(names, environment)


def present(recorded: Fingerprint, spec: BackendSpec, environment: Environment) -> dict[str, str]:
    """Return what each part of a recorded fingerprint is here now; left out is what is not known."""
    found = {SOURCES: sources_hash(spec.load.partition(":")[0])} if SOURCES in recorded else {}
    return found | _versions([name for name in recorded if name != SOURCES], environment)


def _versions(names: Sequence[str], environment: Environment) -> dict[str, str]:
    known = {name: version for name in names if (version := environment.version(name)) is not None}
    return {name: ".".join(version.split(".")[:2]) if name in COMPILERS else version for name, version in known.items()}


def stale_parts(backend: str, recorded: Fingerprint, now: Fingerprint) -> list[str]:
    """Return in words which parts are others now; nothing: the times are of the kernels that are here, or alike."""
    changed = [
        name
        for name, was in recorded.items()
        if (here := now.get(name, was)) != was and not _alike(backend, name, was, here)
    ]
    return [
        "its own kernels or schedules changed" if name == SOURCES else f"{name} {recorded[name]}, now {now[name]}"
        for name in changed
    ]


def _alike(backend: str, name: str, *releases: str) -> bool:
    """Whether a row says that these releases of a library are alike for a backend: a library may hold several ones."""
    rows = _alike_rows().get(name, ())
    return any({*releases} <= {*row["releases"]} and backend in row.get("backends", [backend]) for row in rows)


@functools.cache
def _alike_rows() -> dict[str, list[dict[str, list[str]]]]:
    """Return the rows of ``ALIKE`` by library."""
    found: dict[str, list[dict[str, list[str]]]] = tomllib.loads(ALIKE.read_text(encoding="utf-8"))
    return found


@functools.cache
def sources_hash(module: str) -> str:
    """Return a hash of a runtime's code: of its module, and of what that imports of its own plugin at any depth.

    Comments, docstrings and empty lines do not count, and neither do the plugin's facts. Data files that a module names
    and that lie beside it count. 16 hexadecimal digits; the same under every release of Python.
    """
    package = module.partition(".")[0]
    files = _modules(package)
    seen: dict[str, str] = {}
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or f".{name.partition('.')[2]}".startswith(_WITHOUT_TIME):
            continue
        if name in files:
            seen[name], imported = _of_file(files[name], package)
            todo += imported
        elif name == module:
            raise ModuleNotFoundError(f"no module {module}", name=module)
    return _digest("\n".join(f"{name} {seen[name]}" for name in sorted(seen)))[:16]


@functools.cache
def _of_file(path: Path, package: str) -> tuple[str, tuple[str, ...]]:
    """Return a hash of a module's code and data files, and the modules of its own package that it may import."""
    text = code_of(path.read_text(encoding="utf-8"))
    beside = [path.with_name(name) for name in _DATA_FILE.findall(text)]
    texts = [text, *[code_of(each.read_text(encoding="utf-8")) for each in beside if each.is_file()]]
    return _digest("\0".join(texts)), tuple(_imported(text, package))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def code_of(text: str) -> str:
    """Return Python code (or TOML) without comments, docstrings, empty lines and blanks at the ends of lines."""
    kept = _TOKEN.sub(_kept, text)
    return "\n".join([line.rstrip() for line in kept.splitlines() if line.strip()])


def _kept(token: re.Match[str]) -> str:
    """Return a string as it is; nothing for a comment, and for a string in triple quotes that has its lines alone."""
    text, whole = token[0], token.string
    if text[0] == "#":
        return ""
    if text[:3] in ('"""', "'''"):
        before = whole[whole.rfind("\n", 0, token.start()) + 1 : token.start()]
        after = whole[token.end() : whole.find("\n", token.end()) % (len(whole) + 1)]
        if before.strip() in ("", "r") and (not after.strip() or after.lstrip()[0] == "#"):
            return ""
    return text


@functools.cache
def _modules(package: str) -> dict[str, Path]:
    """Return the files of a package's modules; it is found without running more of it than its ``__init__``."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {package}", name=package)
    root = Path(next(iter(spec.submodule_search_locations)))
    found: dict[str, Path] = {}
    for file in root.rglob("*.py"):
        *folders, name = file.relative_to(root).with_suffix("").parts
        found[".".join([package, *folders, *([] if name == "__init__" else [name])])] = file
    return found


def _imported(text: str, package: str) -> Iterator[str]:
    """Yield the modules of its own package that a module's code may import."""
    for name, what in _IMPORT.findall(text):
        if name.partition(".")[0] == package:
            yield name
            for part in re.findall(r"[A-Za-z_]\w*", what):
                yield f"{name}.{part}"  # it is passed over where this is no module
