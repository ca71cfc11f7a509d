"""In which releases of an engine an adapter takes part. Knows no engine: an adapter says what it was run with.

The worst case of an adapter is the engine without attn-select. In a release that is not listed, where an interface of
the engine has moved, where the user's settings cannot be read, and on a device that attn-select does not see as the
engine does, one warning says so and the engine's own choice runs.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_select.errors import AttnSelectError
from attn_select.machine.detection import Detection
from attn_select.machine.variables import ANY_VERSION, STRICT

Warn = Callable[[str], None]
MOVED = (ImportError, AttributeError, TypeError, LookupError)
"""What calls of an engine raise where an interface has moved."""


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


@dataclass(frozen=True, slots=True)
class Adapter:
    """What puts attn-select into one engine."""

    distribution: str  # of the adapter, ``attn-select-NAME``
    engine: str
    version: str  # of the installed engine
    # the ones that the adapter was run with. ``0.32`` stands for every 0.32.x, ``0.32.1`` for that alone
    releases: Sequence[str]
    warn: Warn = _warn  # where warnings go; ``warnings.warn`` unless the engine has a log of its own

    def takes_part(self) -> bool:
        """Whether attn-select takes part in this release; says why not."""
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

    def settings_failed(self, error: AttnSelectError) -> None:
        """Say that attn-select takes no part because rules, a workload or measurements cannot be read."""
        if os.environ.get(STRICT) == "1":
            raise error
        self.warn(f"{self._out()}: {error.message}. {STRICT}=1 in the environment makes this an error")

    def sees(self, found: Detection, compute_capability: tuple[int, int] | None, platform: str) -> bool:
        """Whether attn-select sees the device that the engine runs on; says what differs."""
        device = found.device
        if compute_capability is not None and device.compute_capability == compute_capability:
            return True
        ours = f"{device.full_name or device.name} ({device.capability_text})"
        theirs = platform if compute_capability is None else f"{platform} {'.'.join(map(str, compute_capability))}"
        why = f". {found.note}" if found.note else ""
        self.warn(f"{self._out()}: it runs on {theirs}, and attn-select sees {ours}{why}")
        return False

    def interface_moved(self, error: Exception) -> None:
        """Say that attn-select takes no part because the engine lacks an interface, or has it in another form."""
        self.warn(f"{self._out()}: an interface has moved ({type(error).__name__}: {error})")

    def _out(self) -> str:
        return f"{self.distribution} takes no part in {self.engine} {self.version}, which chooses attention by itself"
