"""Runs commands one after another, goes on behind one that fails, and prints the seconds of each at the end.

    python tests/steps.py "NAME: COMMAND" ...

A NAME that ends with ``&`` runs beside those behind it, and says what it has to say when it has ended. The first step
makes what all others need: where it fails, they are not run. The exit code is 1 where a step failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Ended:
    """What became of a step."""

    seconds: float
    code: int


def run(name: str, command: str, beside: bool) -> Ended:
    """Run a step by the shell."""
    say = "beside what follows" if beside else "now"
    print(f"\n=== {name}, {say}: {command}", flush=True)
    began = time.monotonic()
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if beside else {}
    done = subprocess.run(command, shell=True, check=False, **output)  # type: ignore[call-overload]
    ended = Ended(time.monotonic() - began, done.returncode)
    if beside:
        print(f"\n=== {name} said:\n{done.stdout.decode(errors='replace')}=== end of {name}", flush=True)
    return ended


def main(arguments: list[str]) -> int:
    """Run the steps; return 1 if any failed."""
    steps = [tuple(argument.split(": ", 1)) for argument in arguments]
    began = time.monotonic()
    ended: dict[str, Ended | Future[Ended]] = {}
    with ThreadPoolExecutor() as pool:
        for number, (name, command) in enumerate(steps):
            if name.endswith("&"):
                ended[name] = pool.submit(run, name.rstrip("& "), command, True)
            else:
                ended[name] = found = run(name, command, False)
                if number == 0 and found.code:
                    break
    print(f"\n{'step':<28} {'seconds':>8}")
    codes = []
    for name, _ in steps:
        found = ended.get(name)
        one = found.result() if isinstance(found, Future) else found
        codes.append(1 if one is None else one.code)
        result = "not run" if one is None else "" if one.code == 0 else f"failed with exit code {one.code}"
        print(f"{name:<28} {'' if one is None else f'{one.seconds:.0f}':>8}  {result}".rstrip())
    print(f"{'all':<28} {time.monotonic() - began:>8.0f}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
