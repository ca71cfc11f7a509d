"""In which releases of an engine an adapter takes part. Knows no engine: an adapter says what it was run with.

The worst case of an adapter is the engine without attn-select. In a release that is not listed, and where an interface
of the engine has moved, one warning says so and the engine's own choice runs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_select.variables import ANY_VERSION

Warn = Callable[[str], None]
MOVED = (ImportError, AttributeError, TypeError, LookupError)
"""What calls of an engine raise where an interface has moved."""


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


@dataclass(frozen=True, slots=True)
class Adapter:
    """What puts attn-select into one engine.

    Attributes:
        distribution: of the adapter, ``attn-select-NAME``.
        engine: the engine's name, as people write it.
        version: of the installed engine.
        releases: those that the adapter was run with. ``0.32`` stands for every 0.32.x, ``0.32.1`` for that alone.
        warn: where warnings go; ``warnings.warn`` unless the engine has a log of its own.
    """

    distribution: str
    engine: str
    version: str
    releases: Sequence[str]
    warn: Warn = _warn

    def takes_part(self) -> bool:
        """Whether attn-select takes part in this release; says why not.

        True in a listed release, and in any other with ``ATTN_SELECT_ANY_VERSION=1``.
        """
        parts = self.version.partition("+")[0].split(".")
        if any(release.split(".") == parts[: release.count(".") + 1] for release in self.releases):
            return True
        if os.environ.get(ANY_VERSION) == "1":
            return True
        self.warn(
            f"{self._out()}: it was run with {' and '.join(self.releases)} alone. {ANY_VERSION}=1 in the environment "
            "lets it take part"
        )
        return False

    def interface_moved(self, error: Exception) -> None:
        """Say that attn-select takes no part because the engine lacks an interface, or has it in another form."""
        self.warn(f"{self._out()}: an interface has moved ({type(error).__name__}: {error})")

    def _out(self) -> str:
        return f"{self.distribution} takes no part in {self.engine} {self.version}, which chooses attention by itself"
