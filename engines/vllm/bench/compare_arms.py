"""The arms of ``compare.py`` seen from outside: processes that are told what to do, line by line."""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn


class ArmError(Exception):
    """An arm's process ended before it was told to."""


class Arm:
    """One engine in a process of its own; its whole output goes to a file."""

    def __init__(self, name: str, job: dict[str, Any], variables: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._start: dict[str, Any] | None = None
        fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("compare_engine.py")), json.dumps(job)],
            env=os.environ | fixed | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        atexit.register(self.process.kill)
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, line: str) -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def _listen(self) -> None:
        """Write the process's output to the log, and keep its answers; None follows the last."""
        assert self.process.stdout is not None
        with self.log.open("w") as log:
            for said in self.process.stdout:
                log.write(said)
                if said.startswith("BENCH "):
                    log.flush()
                    self._answers.put(json.loads(said[6:]))
                elif "hook.py" in said or "takes no part" in said:
                    print(f"{self.name}: {said.partition('] ')[2].rstrip()}", flush=True)
        self._answers.put(None)

    def wait(self) -> None:
        """Wait until the engine has started, or has ended."""
        if self._start is None:
            self._start = self._answers.get() or {}

    def started(self) -> dict[str, Any]:
        """Return the answer to the line that started the engine."""
        self.wait()
        return self._start or self._ended()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to a line."""
        return self._answers.get() or self._ended()

    def _ended(self) -> NoReturn:
        raise ArmError(f"{self.name} ended; the end of its output:\n{self.log.read_text()[-4000:]}")

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer."""
        self.say(line)
        return self.answer()

    def end(self) -> None:
        """End the process, so that its memory is free."""
        self.process.kill()
        self.process.wait()


def together(arms: list[Arm], line: str) -> list[dict[str, Any]]:
    """Send all arms a line, and wait for all answers."""
    for arm in arms:
        arm.say(line)
    return [arm.answer() for arm in arms]
