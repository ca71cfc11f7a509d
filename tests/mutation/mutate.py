"""Plant faults in core, one at a time, and count how many the tests notice. `make mutate` runs it.

First the named faults of planted.toml, then a sample that a seed draws from all faults that faults.py finds in
core/attn_select without reference/ and testing/. All work happens on copies. Results of an interrupted run are kept in
build/mutate and taken up again as far as they still hold. After a change, the test that caught a fault before is tried
first.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from faults import Fault, find_faults

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
STATE = ROOT / "build" / "mutate"
SOURCES = "core/attn_select"
GUARDS = ("tests/*/test_*.py", "measure/tests/test_*.py", "plugins/torch/tests/test_*.py")
"""Tests of core and of what runs on it everywhere: measuring, and torch's backends."""
NO_GUARDS = ("browser", "docs", "packaging")
"""Folders of tests that drive a browser, run the documents' commands or install wheels."""
GUARDS_ALONE = ("tests/test_detection.py", "tests/test_devices.py", "tests/test_kernel_names.py")
EXPECTED = 0.95
RECORDING_SECONDS = 1200
CAUGHT, SURVIVED, OUT_OF_TIME = "caught", "survived", "out of time"


class BrokenError(Exception):
    """The tests cannot be collected."""


class Zygote:
    """A pytest process that has collected some files of a copy and runs their tests in forked children."""

    def __init__(self, copy: Path, files: Sequence[str]) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        paths = [
            *(copy / name for name in ("core", "cli", "measure", "tests/mutation")),
            *sorted(copy.glob("plugins/*")),
        ]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "MUTATE_REQUESTS": str(requests),
            "MUTATE_ANSWERS": str(answers),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "server", "-p", "no:cacheprovider", *files]
        with (copy / "pytest.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=copy, env=variables, pass_fds=(requests, answers), stdout=log, stderr=log
            )
        os.close(requests)
        os.close(answers)
        self._reader = os.fdopen(self._answers)
        self._writer = os.fdopen(self._requests, "w")
        try:
            self.tests: list[str] = self._answer()["tests"]
        except BrokenError:
            self.close()
            raise

    def ask(self, tests: Sequence[str], seconds: float, **more: Any) -> dict[str, Any]:
        """Run tests in a fork; see server.py for the answer."""
        print(json.dumps({"tests": tests, "seconds": seconds, **more}), file=self._writer, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._reader.readline()
        if not line:
            raise BrokenError
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            sys.exit(answer["error"])
        return answer

    def close(self) -> None:
        self._writer.close()
        self._process.wait()
        self._reader.close()


class Plan:
    """Which tests run for a fault: those that execute its lines, the quick ones first."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.seconds: dict[str, float] = {}
        self.left_out: set[str] = set()
        self.by_line: dict[tuple[str, int], set[str]] = {}

    def add(self, recorded: dict[str, dict[str, Any]]) -> None:
        for test, facts in recorded.items():
            self.seconds[test] = facts["seconds"]
            if not facts["passes"]:
                self.left_out.add(test)
            for file, lines in facts["lines"].items():
                for line in lines:
                    self.by_line.setdefault((file, line), set()).add(test)

    def tests(self, fault: Fault) -> list[str]:
        """Tests for a fault; none where nothing executes its lines.

        What runs at import has no tests of its own: those of its class or function come first, or those of its file,
        and then, within a budget of seconds of their own, all others, since a table's readers may be anywhere.
        """
        found = self._of_lines(fault.file, fault.line, fault.last_line) if fault.in_body else set()
        for first, last in (fault.scope, (1, 5000)):
            found = found or self._of_lines(fault.file, first, last)
        # Lines that a shared fixture runs are recorded for the first test that asks for it: its file's others follow.
        files = {test.partition("::")[0] for test in found}
        others = {test for test in self.seconds if not fault.in_body or test.partition("::")[0] in files} - found
        stem = Path(fault.file).stem
        chosen: list[str] = []
        for tests in (found, others):
            budget = self.budget
            for test in sorted(tests - self.left_out, key=lambda test: self._cost(test, stem)):
                budget -= self.seconds[test]
                if chosen and budget < 0:
                    break
                chosen.append(test)
        return chosen

    def _cost(self, test: str, stem: str) -> float:
        """Seconds; a tenth for tests of a file that is named after the source."""
        return self.seconds[test] * (0.1 if stem in test.partition("::")[0] else 1.0)

    def _of_lines(self, file: str, first: int, last: int) -> set[str]:
        return set().union(*(self.by_line.get((file, line), ()) for line in range(first, last + 1)))


class Worker:
    """One copy of the tree, with the process that runs tests in it."""

    def __init__(self, copy: Path, files: Sequence[str], plan: Plan) -> None:
        self.copy = copy
        self.plan = plan
        self.zygote = Zygote(copy, files)
        self.trusted: set[tuple[str, str]] = set()

    def record(self, file: str) -> dict[str, Any]:
        tests = [test for test in self.zygote.tests if test.partition("::")[0] == file]
        return self.zygote.ask(tests, RECORDING_SECONDS, record=str(self.copy / SOURCES))

    def judge(self, fault: Fault, tests: Sequence[str] = ()) -> dict[str, Any]:
        """Plant a fault and run its tests, or these ones."""
        start = time.monotonic()
        while True:
            chosen = list(tests) or self.plan.tests(fault)
            if not chosen and not fault.tests:
                verdict = {"outcome": SURVIVED, "test": "", "why": "no test executes it"}
                break
            with self._planted(fault):
                verdict = self._run(fault, chosen)
            test = verdict["test"]
            if verdict["outcome"] == OUT_OF_TIME and self._run(fault, chosen)["outcome"] == OUT_OF_TIME:
                sys.exit(f"the tests run out of time without a fault: {' '.join(chosen or fault.tests)}")
            if not test or self._passes_without(test, fault):
                break
            self.plan.left_out.add(test)
        return {"key": fault.key, "name": fault.name, **verdict, "seconds": round(time.monotonic() - start, 1)}

    def judge_again(self, fault: Fault, test: str) -> dict[str, Any] | None:
        """Verdict if the test that caught a fault before ("" where an import failed) catches it still."""
        start = time.monotonic()
        if test and test not in self.zygote.tests and not fault.tests:
            return None
        with self._planted(fault):
            verdict = self._run(fault, [test or self.zygote.tests[0]])
        if verdict["outcome"] != CAUGHT or (verdict["test"] and not self._passes_without(verdict["test"], fault)):
            return None
        return {"key": fault.key, "name": fault.name, **verdict, "seconds": round(time.monotonic() - start, 1)}

    @contextlib.contextmanager
    def _planted(self, fault: Fault) -> Iterator[None]:
        path = self.copy / fault.file
        source = path.read_bytes()
        path.write_bytes(fault.apply(source))
        try:
            yield
        finally:
            path.write_bytes(source)

    def _run(self, fault: Fault, tests: list[str]) -> dict[str, Any]:
        seconds = 20 + 4 * sum(self.plan.seconds.get(test, 1.0) for test in tests)
        if fault.in_body:
            verdict = self.zygote.ask(tests, seconds, swap=str(self.copy / fault.file))
            if verdict["outcome"] != SURVIVED:
                return verdict
        # A survivor has to survive fresh imports too: something may have been computed at import or cached.
        files = list(fault.tests) or list(dict.fromkeys(test.partition("::")[0] for test in tests))
        try:
            fresh = Zygote(self.copy, files)
        except BrokenError:
            return {"outcome": CAUGHT, "test": "", "why": "import fails"}
        try:
            return fresh.ask(fresh.tests if fault.tests else tests, max(seconds, 300) if fault.tests else seconds)
        finally:
            fresh.close()

    def _passes_without(self, test: str, fault: Fault) -> bool:
        """Whether the test that failed passes alone on the sound source."""
        if (test, fault.file) not in self.trusted:
            if test in self.zygote.tests:
                answer = self.zygote.ask([test], 300, swap=str(self.copy / fault.file))
            else:
                sound = Zygote(self.copy, [test.partition("::")[0]])
                answer = sound.ask([test], 300)
                sound.close()
            if answer["outcome"] != SURVIVED:
                return False
            self.trusted.add((test, fault.file))
        return True


def planted_faults(root: Path) -> list[Fault]:
    """The named faults of planted.toml; each text must stand in its file exactly once."""
    found = []
    for entry in tomllib.loads((HERE / "planted.toml").read_text())["fault"]:
        path, old = root / entry["file"], entry["old"].encode()
        source = path.read_bytes() if path.exists() else b""
        if source.count(old) != 1:
            sys.exit(f"planted.toml, {entry['name']}: {entry['file']} holds {entry['old']!r} {source.count(old)} times")
        start = source.index(old)
        line = source.count(b"\n", 0, start) + 1
        last_line = line + entry["old"].rstrip("\n").count("\n")
        scope = _scope(ast.parse(source), line, source.count(b"\n") + 1)
        found.append(
            Fault(
                file=entry["file"],
                function=scope[0],
                change=f"{entry['old']}  ->  {entry['new']}",
                line=line,
                last_line=last_line,
                start=start,
                end=start + len(old),
                text=entry["new"],
                in_body=scope[1] and not entry.get("tests"),
                scope=scope[2],
                name=entry["name"],
                tests=tuple(entry.get("tests", ())),
            )
        )
    return found


def _scope(tree: ast.AST, line: int, lines: int) -> tuple[str, bool, tuple[int, int]]:
    """Innermost function or class around a line, whether the line is in a function's body, and the lines around it."""
    names, body, span = [], False, (1, lines)
    node: ast.AST | None = tree
    while node is not None:
        inside = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt))
        node = next((each for each in inside if each.lineno <= line <= (each.end_lineno or 0)), None)
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.append(node.name)
            span = node.lineno, node.end_lineno or node.lineno
            body = body or (isinstance(node, ast.FunctionDef) and line >= node.body[0].lineno)
    return ".".join(names) or "<module>", body, span


def equivalents() -> dict[str, str]:
    """Reason per key of the faults that change nothing that a caller can observe."""
    entries = tomllib.loads((HERE / "equivalent.toml").read_text()).get("equivalent", [])
    return {f"{each['file']} | {each['function']} | {each['change']}": each["reason"] for each in entries}


def copy_tree(to: Path) -> None:
    """Copy what git knows or would add, compiled so that a changed source is always noticed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, to / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    for folder in ("core", "cli", "measure", "plugins"):
        compileall.compile_dir(to / folder, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def digest(root: Path, files: Iterable[str]) -> str:
    """A short hash of files' names and contents."""
    total = hashlib.sha256(sys.version.encode())
    for file in sorted(files):
        total.update(file.encode() + b"\0" + (root / file).read_bytes() + b"\0")
    return total.hexdigest()[:24]


@dataclass(frozen=True)
class Proof:
    """What a verdict rests on: a failing test's file and what all tests share; of a survivor all that was run."""

    root: Path
    shared: str
    tree: str
    budget: float

    def of(self, verdict: dict[str, Any]) -> str:
        file = verdict["test"].partition("::")[0]
        if not file:
            return f"{self.tree} {self.budget}"
        return f"{self.shared} {digest(self.root, [file])}" if (self.root / file).exists() else "gone"


def record_all(workers: Sequence[Worker], files: Sequence[str], shared: str, plan: Plan) -> None:
    """Have every test file's lines recorded, or read them back where neither it nor what it shares has changed."""
    todo: list[tuple[str, Path]] = []
    for file in files:
        kept = STATE / "recorded" / f"{digest(workers[0].copy, [file])}-{shared}.json"
        if kept.exists():
            plan.add(json.loads(kept.read_text()))
        else:
            todo.append((file, kept))

    def record(worker: Worker, due: tuple[str, Path]) -> None:
        file, kept = due
        start = time.monotonic()
        recorded = worker.record(file)
        if "outcome" in recorded:
            sys.exit(f"{file} cannot be recorded: it ends its process")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(recorded))
        plan.add(recorded)
        print(f"recorded {file}: {len(recorded)} tests, {time.monotonic() - start:.0f} s", flush=True)

    spread(workers, todo, record)


class Verdicts:
    """Verdict per fault's key. Each is kept in a file with what it rests on."""

    def __init__(self, proof: Proof) -> None:
        self.of: dict[str, dict[str, Any]] = {}
        self.caught_before: dict[str, str] = {}
        self._proof = proof
        self._file = STATE / "verdicts.jsonl"
        self._lock = threading.Lock()
        for verdict in map(json.loads, self._file.read_text().splitlines() if self._file.exists() else ()):
            if verdict["proof"] == proof.of(verdict):
                self.of[verdict["key"]] = verdict
            elif verdict["outcome"] == CAUGHT:
                self.caught_before[verdict["key"]] = verdict["test"]

    def add(self, verdict: dict[str, Any], keep: bool) -> None:
        verdict["proof"] = self._proof.of(verdict)
        with self._lock:
            self.of[verdict["key"]] = verdict
            if keep:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a") as out:
                    print(json.dumps(verdict), file=out)
            by = verdict["test"] or verdict.get("why", "")
            text = f"{verdict['outcome']:<12} {verdict['seconds']:5.1f} s  {verdict['name'] or verdict['key']}"
            print(f"[{len(self.of)}] {text}" + (f"  by {by}" if by else ""), flush=True)


def spread(workers: Sequence[Worker], things: Iterable[Any], work: Callable[[Worker, Any], None]) -> None:
    """Have workers take things until none is left."""
    todo: SimpleQueue[Any] = SimpleQueue()
    for thing in things:
        todo.put(thing)

    def take(worker: Worker) -> None:
        with contextlib.suppress(Empty):
            while True:
                thing = todo.get_nowait()
                work(worker, thing)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(take, workers))


def report(planted: Sequence[Fault], drawn: Sequence[Fault], verdicts: dict[str, dict[str, Any]], seed: int) -> bool:
    """Print the scores and every survivor; True where they are as expected."""
    reasons = equivalents()
    alive = [fault for fault in [*planted, *drawn] if verdicts[fault.key]["outcome"] == SURVIVED]
    survivors = [fault for fault in alive if fault.key not in reasons]
    for fault in survivors:
        print(f"\nsurvivor: {fault.name}" if fault.name else "\nsurvivor")
        print(f"  {fault.file}:{fault.line} in {fault.function}\n  {fault.change}")
        print(f"  {verdicts[fault.key].get('why', 'its tests pass')}")
    lost = [fault for fault in survivors if fault.name]
    counted = [fault for fault in drawn if fault.key not in reasons]
    caught = len(counted) - sum(not fault.name for fault in survivors)
    score, equal = caught / len(counted) if counted else 1.0, len(drawn) - len(counted)
    late = sum(verdicts[fault.key]["outcome"] == OUT_OF_TIME for fault in counted)
    print(f"\nplanted: {len(planted) - len(lost)} of {len(planted)} caught")
    print(f"drawn with seed {seed}: {caught} of {len(counted)} caught ({score:.1%}); {equal} more are equivalent")
    print(f"{late} of those caught ran out of time")
    return not lost and score >= EXPECTED


def drawn_from(root: Path) -> list[Fault]:
    """All faults of core without reference/ and testing/, in order of files and lines."""
    sources = sorted(str(path.relative_to(root)) for path in root.glob(f"{SOURCES}/**/*.py"))
    planted = [file for file in sources if not {"reference", "testing"} & {*Path(file).parts}]
    return [fault for file in planted for fault in find_faults(root, file)]


def guards(root: Path) -> list[str]:
    """The test files that may notice a fault."""
    found = [path for where in GUARDS for path in sorted(root.glob(where))]
    files = [path.relative_to(root) for path in found]
    return [*GUARDS_ALONE, *(str(file) for file in files if file.parent.name not in NO_GUARDS)]


def files_of(root: Path) -> list[str]:
    """All files of a copy."""
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.name != "pytest.log" and "__pycache__" not in path.parts
    ]


def bears_on_recording(file: str) -> bool:
    """Whether a file may change what the tests of other files execute."""
    return not (file.endswith(".md") or file.startswith("tests/mutation/") or Path(file).name.startswith("test_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="faults to draw (300)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (1)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument(
        "--budget", type=float, default=20, help="processor seconds of tests per fault, the quick ones first (20)"
    )
    parser.add_argument("--fault", action="append", default=[], help="only faults whose key or name holds this text")
    parser.add_argument(
        "--tests", action="append", default=[], help="run these files, not the recorded choice of tests"
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, contextlib.ExitStack() as stack:
        copies = [Path(folder) / str(i) for i in range(options.jobs)]
        for copy in copies:
            copy_tree(copy)
        planted, every = planted_faults(copies[0]), drawn_from(copies[0])
        if options.fault:
            planted, drawn = (
                [fault for fault in faults if any(each in (fault.name or fault.key) for each in options.fault)]
                for faults in (planted, every)
            )
        else:
            drawn = sorted(every, key=lambda fault: fault.rank(options.seed))[: options.count]
        files, all_files = options.tests or guards(copies[0]), files_of(copies[0])
        plan = Plan(options.budget)
        with ThreadPoolExecutor(options.jobs) as pool:
            workers = list(pool.map(lambda copy: Worker(copy, files, plan), copies))
        for worker in workers:
            stack.callback(worker.zygote.close)
        shared = digest(copies[0], filter(bears_on_recording, all_files))
        verdicts = Verdicts(Proof(copies[0], shared, digest(copies[0], all_files), options.budget))

        def judge_again(worker: Worker, fault: Fault) -> None:
            if verdict := worker.judge_again(fault, verdicts.caught_before[fault.key]):
                verdicts.add(verdict, keep=True)

        def judge(worker: Worker, fault: Fault) -> None:
            verdicts.add(worker.judge(fault, tests), keep=not tests)

        faults = [*planted, *drawn]
        tests = workers[0].zygote.tests if options.tests else []
        if tests:
            verdicts.of.clear()
        else:
            known = verdicts.caught_before.keys() - verdicts.of.keys()
            spread(workers, [fault for fault in faults if fault.key in known], judge_again)
        left = [fault for fault in faults if fault.key not in verdicts.of]
        if left and not tests:
            record_all(workers, files, shared, plan)
            if plan.left_out:
                print("left out, since they fail without a fault:", *sorted(plan.left_out), sep="\n  ")
        print(f"{len(left)} of {len(faults)} faults are to be judged", flush=True)
        spread(workers, left, judge)
        fine = report(planted, drawn, verdicts.of, options.seed)
        if gone := set(equivalents()) - {fault.key for fault in every}:
            print("equivalent.toml names faults that no longer exist:", *sorted(gone), sep="\n  ")
            fine = False
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
