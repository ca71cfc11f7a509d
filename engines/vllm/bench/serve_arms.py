"""The arms of ``serve.py`` seen from outside: processes that are told what to do, line by line."""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class ArmError(Exception):
    """An arm's process ended before it was told to."""


class Arm:
    """One engine in a process of its own; its whole output goes to a file."""

    def __init__(self, name: str, job: dict[str, Any], variables: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("serve_engine.py")), json.dumps(job)],
            env=os.environ | fixed | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        atexit.register(self.process.kill)
        threading.Thread(target=self._listen, daemon=True).start()

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

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and wait for the answer; ArmError where the process ends before."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        if not (answer := self._answers.get()):
            raise ArmError(f"{self.name} ended; the end of its output:\n{self.log.read_text()[-4000:]}")
        return answer

    def end(self) -> None:
        """End the process, so that its memory is free."""
        self.process.kill()
        self.process.wait()
