"""In which releases of an engine an adapter takes part. Knows no engine: an adapter says what it was run with.

The worst case of an adapter is the engine without attn-select. In a release that is not listed, where an interface of
the engine has moved, where the user's settings cannot be read, on a device that attn-select does not see as the engine
does, and where attn-select itself fails, one warning says so and the engine's own choice runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from attn_select.backends.registry import load_plugins
from attn_select.decide.selector import rules_in_an_engine
from attn_select.errors import AttnSelectError, RulesError
from attn_select.machine.detection import Detection
from attn_select.machine.variables import ANY_VERSION, STRICT, is_on
from attn_select.rules.document import problem_text
from attn_select.rules.layers import RuleSet
from attn_select.rules.lint import known_names, unknown_names

Found = TypeVar("Found")
MOVED = (ImportError, AttributeError, TypeError, LookupError)
"""What calls of an engine raise where an interface has moved."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What puts attn-select into one engine."""

    distribution: str  # of the adapter, ``attn-select-NAME``
    engine: str
    version: str  # of the installed engine
    # the ones that the adapter was run with. ``0.32`` stands for every 0.32.x, ``0.32.1`` for that alone
    releases: Sequence[str]
    warn: Callable[[str], None]  # where warnings go

    def joins(self, install: Callable[[], None]) -> bool:
        """Put attn-select into the engine by ``install``; return whether it takes part, and say why not."""

        def installed() -> bool:
            install()
            return True

        return self._was_run() and bool(self.unless_it_fails(installed))

    def _was_run(self) -> bool:
        """Whether the adapter was run with this release, or is to take part in any."""
        parts = self.version.partition("+")[0].split(".")
        if any(release.split(".") == parts[: release.count(".") + 1] for release in self.releases):
            return True
        if is_on(ANY_VERSION):
            return True
        self.warn(
            f"{self._out()}: it was run with {' and '.join(self.releases)} alone. {ANY_VERSION}=1 in the environment "
            "lets it take part"
        )
        return False

    def rules(self) -> RuleSet:
        """Return the rules of the engine's process; a warning says where they name a backend that nobody knows.

        Raises:
            RulesError: a file is missing or broken; with ``ATTN_SELECT_STRICT=1`` such a name is an error too.
        """
        rules = rules_in_an_engine()
        unknown = [problem_text(problem) for problem in unknown_names(rules, known_names(load_plugins()))]
        if unknown and is_on(STRICT):
            raise RulesError("; ".join(unknown))
        for text in unknown:
            self.warn(f"attn-select: {text}. {STRICT}=1 in the environment makes this an error")
        return rules

    def unless_it_fails(self, choose: Callable[[], Found]) -> Found | None:
        """Return what is chosen; None, and a warning, where settings cannot be read or an interface has moved.

        So where attn-select has a fault: it may end no engine that runs without it.
        """
        try:
            return choose()
        except AttnSelectError as error:
            failed: Exception = error
            why = error.message
        except MOVED as error:
            self.interface_moved(error)
            return None
        except Exception as error:
            failed, why = error, f"a fault of attn-select ({type(error).__name__}: {error})"
        if is_on(STRICT):
            raise failed
        self.warn(f"{self._out()}: {why}. {STRICT}=1 in the environment makes this an error")
        return None

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
