"""The arms of ``serve.py`` and ``settings.py`` seen from outside: processes that are told what to do, and answer."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from serve_engine import MODELS

from attn_select_vllm.names import OWN_PREFIX

BASE, OURS = "vLLM", "attn-select"
"""The arms of vLLM's choice and of attn-select's; others are named by vLLM's names of backends."""


def arm_names(model: str, backends: str) -> list[str]:
    """Return the names of a model's arms; ``backends`` are more of them with commas, for its kind of layers or not."""
    is_mla = "kv_lora_rank" in MODELS[model]
    return [BASE, OURS, *[name for name in backends.split(",") if name and ("MLA" in name) == is_mla]]


class ArmError(Exception):
    """An arm's process ended before it was told to, or said nothing in the time that it had."""


class Arm:
    """One engine in a process of its own; its whole output goes to a file, by whose name errors speak of it."""

    def __init__(self, name: str, job: dict[str, Any], log: Path) -> None:
        self.name, self.log = name, log
        job = job | {"backend": None if name in (BASE, OURS) else name}
        plugin = "attn_select" if name == OURS or name.startswith(OWN_PREFIX) else ""
        variables = {"VLLM_PLUGINS": plugin, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        program = str(Path(__file__).with_name("serve_engine.py"))
        self._pipe, theirs = Pipe()
        with log.open("w") as output, theirs:
            # A process as a user starts one: what multiprocessing makes is a worker in the eyes of vLLM's plugins.
            self._process = subprocess.Popen(
                [sys.executable, program, str(theirs.fileno()), json.dumps(job)],
                env=os.environ | variables | {"HF_HUB_OFFLINE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.end)

    def start(self, limit: float | None = None) -> dict[str, Any]:
        """Start the engine; return its ``layers`` by backend, and the seconds that it ``took``."""
        return self.ask(limit=limit)

    def ask(self, *arguments: Any, limit: float | None = None) -> dict[str, Any]:
        """Give the process a method of ``Engine`` with its arguments, and wait; ArmError where it ends before.

        ArmError too where nothing comes in ``limit`` seconds.
        """
        try:
            self._pipe.send(arguments)
            if not self._pipe.poll(limit):
                raise ArmError(f"{self.log.stem} said nothing in {limit:.0f} s; the end of its output:\n{self.tail()}")
            found: dict[str, Any] = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ArmError(f"{self.log.stem} ended; the end of its output:\n{self.tail()}") from error
        return found

    def tail(self) -> str:
        """Return the end of its output."""
        return self.log.read_text()[-4000:]

    def said(self) -> list[str]:
        """Return what attn-select has logged in it."""
        lines = self.log.read_text().splitlines()
        return [line.partition("] ")[2] for line in lines if "hook.py" in line or "takes no part" in line]

    def end(self) -> None:
        """End the process and those that it started, so that their memory is free."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
