"""Run tests of the kernels under compute-sanitizer's memcheck: small shapes, every kernel, one process per test file.

    python plugins/triton/bench/sanitize.py [--jobs 8] [--files REGEX] [--select EXPRESSION] [--limit SECONDS]

PyTorch's allocator is told to give every tensor an allocation of its own, so that a read or write behind a tensor's end
is seen. Prints a line per file as it is done. Exits with 9 where the sanitizer found an error, with 1 where a test
failed or a file was not done within its limit.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
FILES = "cache|decode|merge|prefill|paged_kernels|mla_decode|mla_cache|ops|invariance"
SELECT = "not (test_on_a_gpu and not (plain and 128)) and not deepseek and not 128_ki"
"""Of pytest's ``-k``: leaves out most of the hundreds of cases of the same kernels, and long contexts."""
ERROR_EXIT = 9


def run(path: Path, select: str, limit: float) -> int:
    """Check one test file, print what came out, return the exit status: 0 where nothing was found."""
    start = time.monotonic()
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(ERROR_EXIT)]
    command += [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", select, str(path)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        print(f"{path.name}: not done in {limit:.0f} s", flush=True)
        return 1
    output = done.stdout + done.stderr
    said = re.findall(r"^=* ?(\d+ (?:passed|failed).*?|ERROR SUMMARY: .*?) ?=*$", output, re.MULTILINE)
    said += re.findall(r"ERROR SUMMARY: \d+ errors?", output) if not any("SUMMARY" in line for line in said) else []
    print(f"{path.name}: exit {done.returncode}; {'; '.join(said)}; {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode not in (0, 5):  # 5: nothing selected
        print("\n".join(output.splitlines()[-60:]), flush=True)
    return 0 if done.returncode == 5 else done.returncode


def main() -> None:
    """Check all files, several at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--files", default=FILES, help="regex of test files' names")
    parser.add_argument("--select", default=SELECT)
    parser.add_argument("--limit", type=float, default=400)
    asked = parser.parse_args()
    paths = [path for path in sorted(TESTS.glob("test_triton_*.py")) if re.search(asked.files, path.stem)]
    with ThreadPoolExecutor(asked.jobs) as pool:
        sys.exit(max(pool.map(lambda path: run(path, asked.select, asked.limit), paths)))


if __name__ == "__main__":
    main()
