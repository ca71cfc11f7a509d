"""CPUs that list AMX and cannot run it: found out in a child process, and worked around for oneDNN.

Some virtual machines list ``amx_tile`` in ``/proc/cpuinfo`` although their CPUID leaf 0x1D describes no tiles. There
oneDNN, which multiplies bfloat16 for torch, ends the process with SIGILL. ``ONEDNN_MAX_CPU_ISA`` keeps oneDNN from AMX
(oneDNN, "CPU Dispatcher Control"); it counts if it is set before the first product.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from attn_select.machine.files import replace_file
from attn_select.machine.interpreter import interpreter

AmxState = Literal["not-listed", "variable-set", "untried", "works", "traps", "unknown"]
"""``not-listed``: the CPU lists no AMX. ``variable-set``: ``ONEDNN_MAX_CPU_ISA`` has a value already. ``untried``:
torch is not installed, or no child was to run. ``unknown``: the child gave no answer."""
VARIABLE: Final = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX: Final = "AVX512_CORE_FP16"
CPUINFO: Final = Path("/proc/cpuinfo")
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
DESCRIPTIONS: Final[dict[AmxState, str]] = {
    "not-listed": "the CPU lists none",
    "variable-set": f"not tried: {VARIABLE} is set",
    "untried": "the CPU lists it; not tried",
    "works": "the CPU lists it, and it works",
    "traps": f"the CPU lists it, and its instructions end a process: {VARIABLE}={WITHOUT_AMX} is set for torch",
    "unknown": f"the CPU lists it, and a test gave no answer; against SIGILL set {VARIABLE}={WITHOUT_AMX}",
}
"""What ``doctor`` says of each state."""
PRODUCT: Final = "import torch; a = torch.ones(64, 64, device='cpu').bfloat16(); a @ a"
"""What the child runs: one product of bfloat16, the least that oneDNN takes AMX for."""
SECONDS: Final = 60.0
"""That the child may take; most of it imports torch."""


def avoid_trapping_amx(say: Callable[[str], object] | None = None, *, try_it: bool = True) -> AmxState:
    """Keep oneDNN from AMX where its instructions trap; call this before the first product on a CPU.

    The answer is kept until the next boot, so that a child runs once. Elsewhere than on Linux nothing happens.
    """
    if os.environ.get(VARIABLE):
        return "variable-set"
    if not _lists_amx():
        return "not-listed"
    if importlib.util.find_spec("torch") is None:
        return "untried"
    kept = _kept_answer()
    state = _read(kept)
    if state == "unknown":
        if not try_it:
            return "untried"
        state = _tried()
        if kept is not None and state != "unknown":
            _keep(kept, state)
    if state == "traps":
        os.environ[VARIABLE] = WITHOUT_AMX
    if text := _notice(state):
        (say or _to_stderr)(text)
    return state


def _notice(state: AmxState) -> str | None:
    if state == "traps":
        return (
            f"attn-select: this CPU lists AMX, and AMX instructions end a process here: {VARIABLE}={WITHOUT_AMX} is set"
        )
    if state == "unknown":
        return (
            f"attn-select: this CPU lists AMX, and a test of its instructions gave no answer. If a "
            f"process ends with 'Illegal instruction', set {VARIABLE}={WITHOUT_AMX}"
        )
    return None


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


def _lists_amx() -> bool:
    with contextlib.suppress(OSError), CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("flags"):  # of the first core; the others have the same
                return "amx_tile" in line.split()
    return False


def _kept_answer() -> Path | None:
    """Return the file that keeps this boot's answer; None where there is no boot id or no home directory."""
    import platformdirs

    with contextlib.suppress(OSError, RuntimeError):
        return platformdirs.user_cache_path("attn-select", appauthor=False) / "amx" / BOOT_ID.read_text("ascii").strip()
    return None


def _read(path: Path | None) -> AmxState:
    with contextlib.suppress(OSError, UnicodeError):
        text = None if path is None else path.read_text("ascii")
        if text == "works":
            return "works"
        if text == "traps":
            return "traps"
    return "unknown"


def _keep(path: Path, state: str) -> None:
    """Write this boot's answer and remove the answers of others. A folder that cannot be written costs time alone."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.iterdir():
            other.unlink(missing_ok=True)
        replace_file(path, state.encode("ascii"))


def _tried() -> AmxState:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); {PRODUCT}"
    nowhere = subprocess.DEVNULL
    try:
        done = subprocess.run(
            interpreter(limited), stdin=nowhere, stdout=nowhere, stderr=nowhere, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if done.returncode == 0:
        return "works"
    return "traps" if done.returncode == -signal.SIGILL else "unknown"
