"""How much memory this machine has left: what takes more is refused, not ended by the system."""

from __future__ import annotations

import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
# The limit of a container and what is used of it, in both versions of Linux's control groups.
CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def free_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping, here and in this container; None where nobody knows."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(MEMINFO), re.MULTILINE)
    free = [int(found[1]) * 1024] if found else []
    for limit, used in CGROUPS:
        numbers = [_text(path).strip() for path in (limit, used)]
        if all(number.isdigit() for number in numbers):
            free.append(int(numbers[0]) - int(numbers[1]))
    return max(0, min(free)) if free else None


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace")
    except OSError:
        return ""
