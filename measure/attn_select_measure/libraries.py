"""Libraries that only some commands need."""

from __future__ import annotations

from importlib.util import find_spec

from attn_select.errors import RuntimeMissingError


def require_libraries(what: str, *names: str) -> None:
    """Raise ``RuntimeMissingError`` where a library that ``what`` needs is not installed; it says what to install."""
    for name in names:
        if find_spec(name) is None:
            raise RuntimeMissingError(
                f"{what} needs {name}, which is not installed", hint="pip install 'attn-select-measure[report]'"
            )
