"""The errors that attn-select raises on purpose.

An error says what was seen, what would be accepted and what to do next. Any other exception that leaves this package is
a bug. The command line prints these errors without a traceback and exits with 2. ``NoBackendError`` (exit code 1)
stands in ``attn_select.decide.selection``, beside the ``Selection`` that it carries.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
from typing import Any


class AttnSelectError(Exception):
    """Base of all documented errors.

    Attributes:
        code: stable kebab-case identifier, part of the JSON output.
        message: what was seen and what is accepted, one sentence.
        hint: the next step, or None.
    """

    code = "error"

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call __init__ with the message alone, which subclasses with other parameters refuse.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def to_dict(self) -> dict[str, str | None]:
        """Return ``{"code", "message", "hint"}`` for the ``error`` object of ``--json``."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


class ConfigError(AttnSelectError, ValueError):
    """An attention config, device or option value that is malformed or contradicts itself.

    Attributes:
        fields: the names of the offending fields, in order.
    """

    code = "invalid-config"

    def __init__(
        self, message: str, *, fields: Iterable[str] = (), hint: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.fields = tuple(fields)


class UnknownNameError(AttnSelectError, ValueError):
    """A backend, GPU, model, option or field name that is not known. Lists the nearest valid names.

    ``note`` is a possible cause, appended to the message.
    """

    code = "unknown-name"

    def __init__(
        self, kind: str, name: str, valid: Iterable[str], *, hint: str | None = None, note: str | None = None
    ) -> None:
        names = list(valid)
        near = nearest(name, names)
        if hint is None:
            hint = f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(names)}"
        message = f"unknown {kind} {shorten(name)!r}"
        super().__init__(f"{message}; {note}" if note else message, hint=hint)
        self.kind = kind
        self.name = name
        self.nearest = near


class ModelError(AttnSelectError, ValueError):
    """A ``config.json`` that cannot be read or does not describe attention layers we know."""

    code = "invalid-model"


class UnknownModelTypeError(ModelError):
    """A model type that no table knows: its layers can only be assumed."""

    code = "unknown-model-type"


class RulesError(AttnSelectError, ValueError):
    """A rules file that cannot be read or breaks the rules format.

    Attributes:
        problems: one ``(file, line or None, message)`` per error found.
    """

    code = "invalid-rules"

    def __init__(
        self, message: str, *, hint: str | None = None, problems: Iterable[tuple[str, int | None, str]] = ()
    ) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class MeasurementError(AttnSelectError, ValueError):
    """A measurement, or a file of them, that cannot be read or written."""

    code = "invalid-measurement"


class PluginError(AttnSelectError):
    """A plugin that registers something that is not a valid backend spec, or whose runtime is not what a spec says."""

    code = "invalid-plugin"


class BackendError(AttnSelectError, RuntimeError):
    """What a backend's own code raised while it was loaded, built metadata or ran a layer; ``__cause__`` is that."""

    code = "backend-failed"


class RuntimeMissingError(AttnSelectError, RuntimeError):
    """A backend whose facts are registered, and whose ``load`` names a runtime that is not there."""

    code = "runtime-missing"


class KernelMismatchError(AttnSelectError, ImportError):
    """An installed kernel library whose version, build or signatures are not what its plugin calls."""

    code = "kernel-mismatch"


def nearest(name: str, valid: Iterable[str], limit: int = 3) -> list[str]:
    """Return up to ``limit`` valid names that look like ``name``, the most similar first."""
    import difflib  # only needed once something is wrong

    by_folded = {v.casefold().replace("-", "_"): v for v in valid}
    folded = name[:100].casefold().replace("-", "_")
    return [by_folded[k] for k in difflib.get_close_matches(folded, by_folded, n=limit, cutoff=0.6)]


def shorten(text: object, limit: int = 80) -> str:
    """Return ``str(text)`` as one printable line of at most ``limit`` characters, for error messages."""
    return _one_line(str, text, limit)


def printable(text: str) -> str:
    """Return foreign text (of a config, a workload, a folder's name) as one printable line, up to 4096 characters.

    Printed as it is, its line breaks and escape codes would forge lines of the output.
    """
    return text if text.isprintable() else shorten(text, 4096)


def show(value: object, limit: int = 80) -> str:
    """Return ``repr(value)`` as one printable line of at most ``limit`` characters, for error messages."""
    return _one_line(repr, value, limit)


def _one_line(convert: Callable[[object], str], value: object, limit: int) -> str:
    try:
        text = convert(value)
    except Exception:  # integers of 5,000 digits, values nested a thousand deep, a stranger's own __repr__
        return f"<{type(value).__name__} that cannot be shown>"
    line = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text[: limit + 1])
    return line if len(line) <= limit else line[: limit - 1] + "…"
