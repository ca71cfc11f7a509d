"""A pytest plugin that collects tests once and then runs chosen ones in forked children, with or without a fault.

Loaded by mutate.py with ``-p server``. A request is one line of JSON on the file descriptor MUTATE_REQUESTS, its answer
one line on MUTATE_ANSWERS. A child shares the imported modules: a fault in a function's body costs no import of torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# What a test found under one fault must not decide about another one; and a failing example need not be small.
hypothesis.settings.register_profile(
    "mutate",
    database=None,
    derandomize=True,
    deadline=None,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile("mutate")

CAUGHT, SURVIVED, OUT_OF_TIME = "caught", "survived", "out of time"


class Server:
    """Answers requests in place of pytest's own loop over the tests."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests = os.fdopen(requests)
        self.answers = os.fdopen(answers, "w")
        self.failed = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve until the requests end."""
        if session.testsfailed:
            return False  # a module cannot be imported: the process ends without an answer
        self.items = {item.nodeid: item for item in session.items}
        self._answer({"tests": list(self.items)})
        for line in self.requests:
            request = json.loads(line)
            self._answer(self._fork(request))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def _answer(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self.answers, flush=True)

    def _fork(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do a request in a child of its own; end it, and what it started, at the limit."""
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads do not survive a fork; none is needed here
            child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.close(read)
            seconds = int(request["seconds"]) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            try:
                text = json.dumps(self._child(request))
            except BaseException:
                text = json.dumps({"error": traceback.format_exc()})
            with os.fdopen(write, "w") as out:
                out.write(text)
            os._exit(0)
        os.close(write)
        # The limit counts processor time, which a busy machine does not stretch; a child that sleeps ends by the clock.
        end = time.monotonic() + 10 * request["seconds"]
        text = b""
        while left := max(0.0, end - time.monotonic()):
            if not select.select([read], [], [], left)[0]:
                break
            if not (chunk := os.read(read, 1 << 20)):
                break
            text += chunk
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            answer = {"outcome": OUT_OF_TIME, "test": ""}  # a fault that ends the process counts the same
        return answer

    def _child(self, request: dict[str, Any]) -> dict[str, Any]:
        if file := request.get("swap"):
            swap_functions(file)
        items = [self.items[each] for each in request["tests"] if each in self.items]
        if request.get("record"):
            return self._record(items, request["record"])
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return {"outcome": CAUGHT, "test": item.nodeid}
        return {"outcome": SURVIVED, "test": ""}

    def _record(self, items: list[pytest.Item], source: str) -> dict[str, Any]:
        """Per test: its processor seconds, whether it passes, and the lines below ``source`` that it runs."""
        import coverage

        recorder = coverage.Coverage(data_file=None, config_file=False, source=[source], messages=False)
        recorder.set_option("run:disable_warnings", ["no-data-collected"])  # all tests of a file may be skipped
        recorded: dict[str, dict[str, Any]] = {}
        recorder.start()
        for item, following in zip(items, [*items[1:], None], strict=True):
            recorder.switch_context(item.nodeid)
            self.failed = ""
            start = processor_seconds()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds = round(processor_seconds() - start, 4)
            recorded[item.nodeid] = {"seconds": seconds, "passes": not self.failed, "lines": {}}
        recorder.stop()
        data = recorder.get_data()
        for file in data.measured_files():
            for line, names in data.contexts_by_lineno(file).items():
                for name in names:
                    if name in recorded:
                        recorded[name]["lines"].setdefault(os.path.relpath(file), []).append(line)
        return recorded


def processor_seconds() -> float:
    """Seconds that this process and the children it waited for have computed, which a busy machine does not stretch."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def swap_functions(file: str) -> None:
    """Give all functions of an imported file the code that the file has now."""
    code = compile(Path(file).read_bytes(), file, "exec")
    codes: dict[tuple[str, int], types.CodeType | None] = {}
    waiting = [code]
    while waiting:
        each = waiting.pop()
        key = each.co_qualname, each.co_firstlineno
        codes[key] = None if key in codes else each  # two lambdas of one line cannot be told apart
        waiting.extend(constant for constant in each.co_consts if isinstance(constant, types.CodeType))
    for function in gc.get_objects():
        if type(function) is types.FunctionType and function.__code__.co_filename == file:
            old = function.__code__
            new = codes.get((old.co_qualname, old.co_firstlineno))
            if new is not None and new.co_freevars == old.co_freevars:
                function.__code__ = new


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it; a test raises it
    config.pluginmanager.register(Server(int(os.environ["MUTATE_REQUESTS"]), int(os.environ["MUTATE_ANSWERS"])))
