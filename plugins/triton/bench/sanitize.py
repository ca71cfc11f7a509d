"""Run tests of the kernels under compute-sanitizer's memcheck: small shapes, every kernel, a few tests per process.

    python plugins/triton/bench/sanitize.py --warm [--jobs 14] [--shard 5] [--files REGEX] [--limit SECONDS]

Every tensor has an allocation of its own with a margin behind it, so that a read or write behind its end is seen.
``--warm`` first runs the same tests without the sanitizer, since compiling kernels takes longest: it fills a Triton
cache of its own, tells which shards take longest, and at the end which kernels never ran.

A planted error is looked for first: with options that check Triton's kernels alone, and with few; the first that find
it are taken. Prints a line per shard as it ends, and one for all. Nothing runs beyond the limit: shards that were cut
off or not begun are named. Exits with 9 where the sanitizer found an error, with 1 where a test failed or a shard was
not done, or the planted error was not found.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
KERNELS = Path(__file__).parents[1] / "attn_select_triton" / "kernels"
SELECTED = {  # of a file's tests, those whose names match; the slowest files first
    "prefill_hopper": r"test_terms\[.*\(14, 2\)|test_pages\[(16|48)-|keys_are_split|as_they_come\[.*True|e4m3\[|"
    r"by_it\[.*fp8",
    "mla_gpu": r"deepseek_layers_on_a_gpu\[(1-1|16-4|71-1|128-2)-",
    "prefill": r"terms\[(plain|window|not causal|ranges|all)\]|layouts|shapes\[|test_fp8\[|gathered|no_cache|"
    r"described\[.*(plain|window)|on_a_gpu\[(64-16-window|96-16-plain|128-(16|64)-plain|256-64-plain)\]|mla_prefill",
    "mla_decode": r"page_boundaries|two\[3-[46]|different_numbers|another_dtype|share|descriptors|strides|fixed_splits|"
    r"deepseek_sizes_on_a_gpu\[(1|16|128)-lens\d*[13579]-[13]-64\]|dtypes_on_a_gpu\[16-fp8",
    "decode": r"terms\[(1-(plain|all)|3-.*)\]|layouts|shapes\[|test_fp8\[|alone|"
    r"on_a_gpu\[(shape0-(auto|fp8_e4m3|fp8_e5m2)|shape[345]-auto)-plain\]",
    "paged_kernels": r"edges|heads': (7|71),|dtypes\[float16-fp8|alibi\[heads1|random_shapes\[[0-3]|launches\[2|"
    r"several_partitions|without_a_query|rows\[(8-auto|32-fp8_e4m3)|on_a_gpu\[\(32, 8, 128\)-32-auto",
    "invariance": r"test_(decode|prefill)\[|test_mla_decode$",
    "attn_decodes": r"test_trees_of_drafts|short_ones_are_not|reserved_workspace|speculative_queries",
    "attn_graphs": r"beside_a_chunk",
    "mla_run": r"decoded_in_pieces",
    "pieces": r"first\[",
    "indexer": r"best_tokens|equal|negative|few_scores|cached\[(32|128)",
    "mla_cache": r"gathers\[(48-16-|3-2-auto|512-64-fp8_e4m3)|many_requests",
    "cache": r"reference_writes\[(auto|fp8_e4m3)|narrower|per_head|gather\[",
    "ops": r"quantize_fp8\[(fp80|fp81-dtype1)|division|and_cache\[\{\}|transposed|gathered|"
    r"flatten_(block_table\[|long)|merge_attn_states$",
    "merge": r"states\[.*-40\]|strided|shares|pieces",
}
PLAIN = ["--padding", "4096", "--require-cuda-init", "no", "--check-exit-code", "no"]
FAST = [
    # ptxas and other children are left alone, and so are torch's kernels, whose mangled names begin with _Z.
    *PLAIN, "--target-processes-filter", "regex:.*python.*", "--kernel-name", "regex=^[a-z0-9_]+_kernel$",
    "--show-backtrace", "device", "--launch-timeout", "120",
]  # fmt: skip
PORTS, FIRST_PORT = 16, 49152
"""A sanitizer takes the first that is free of ten ports from its own on: with one for all, the eleventh waits."""
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


@dataclass(slots=True)
class Shard:
    """Tests that one process runs.

    Attributes:
        name: of it; tests their pytest ids.
        seconds: that they took without the sanitizer; -1: it is not known.
    """

    name: str
    tests: list[str]
    seconds: float = -1.0


@dataclass(slots=True)
class Ended:
    """What a process said; ``status`` None: it was cut off."""

    status: int | None
    output: str
    seconds: float


def run(command: list[str], deadline: float, **variables: str) -> Ended:
    """Run a command until it ends or the deadline (``time.monotonic``) comes, with its children."""
    start = time.monotonic()
    if start >= deadline:
        return Ended(None, "", 0.0)
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | variables,
        )  # fmt: skip
        status: int | None = None
        try:
            status = process.wait(deadline - start)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return Ended(status, said.read(), time.monotonic() - start)


def sanitized(options: list[str], place: int, *command: str, deadline: float) -> Ended:
    """Run Python under the sanitizer, at ports that belong to ``place``."""
    port = str(FIRST_PORT + PORTS * (place % 512))
    tool = ["compute-sanitizer", "--tool", "memcheck", *options, "--port", port]
    return run([*tool, sys.executable, *command], deadline, PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def collect(file: str, deadline: float) -> list[str]:
    """Return the ids of a file's selected tests.

    Raises:
        ValueError: none is.
    """
    path = TESTS / f"test_triton_{file}.py"
    found = run([sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", str(path)], deadline)
    names = [line.split("::", 1)[1] for line in found.output.splitlines() if "::" in line]
    selected = [f"{path}::{name}" for name in names if re.search(SELECTED[file], name)]
    if not selected:
        raise ValueError(f"{path.name}: of {len(names)} tests none matches\n{found.output[-1000:]}")
    return selected


def pytest_of(shard: Shard) -> list[str]:
    """Return what Python runs for a shard."""
    return ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *shard.tests]


def counted(output: str) -> dict[str, int]:
    """Return how many tests passed, failed and so on, by pytest's last line."""
    lines = re.findall(r"^=+ (.*) in [\d.]+s.* =+$", output, re.MULTILINE)
    return {word: int(count) for count, word in re.findall(r"(\d+) (\w+)", lines[-1])} if lines else {}


def warmed(shard: Shard, deadline: float) -> None:
    """Run a shard without the sanitizer."""
    ended = run([sys.executable, *pytest_of(shard)], deadline)
    shard.seconds = ended.seconds
    if ended.status != 0:
        said = "cut off" if ended.status is None else f"exit {ended.status}\n{ended.output[-2000:]}"
        print(f"warm {shard.name}: {said}", flush=True)


def checked(shard: Shard, options: list[str], place: int, deadline: float) -> tuple[int, int, bool]:
    """Check a shard and print what came out; return its tests that passed, errors found, and whether all is well."""
    ended = sanitized(options, place, *pytest_of(shard), deadline=deadline)
    tests, summary = counted(ended.output), SUMMARY.search(ended.output)
    errors = int(summary[1]) if summary else 0
    done = ended.status is not None and summary is not None and bool(tests)
    well = done and not errors and not tests.keys() & {"failed", "error", "errors"}
    said = ", ".join(f"{count} {word}" for word, count in tests.items())
    print(
        f"{shard.name}: {said or 'NOT DONE'}; {f'{errors} errors' if summary else 'no summary of the sanitizer'}; "
        f"{ended.seconds:.0f} s",
        flush=True,
    )
    if not well:
        lines = ended.output.splitlines()
        report = [line for line in lines if line.startswith("=========")]
        print("\n".join([*(report if errors else [])[:40], *lines[-25:]]), flush=True)
    return tests.get("passed", 0), errors, well


def finds(options: list[str], place: int, deadline: float) -> bool:
    """Whether the sanitizer with these options finds the planted error."""
    ended = sanitized(options, place, str(Path(__file__).with_name("planted_error.py")), deadline=deadline)
    summary = SUMMARY.search(ended.output)
    found = summary is not None and int(summary[1]) > 0 and "planted_kernel" in ended.output
    if not found:
        print(f"planted error NOT found with {' '.join(options)}\n{ended.output[-1500:]}", flush=True)
    return found


def never_ran(cache: Path) -> list[str]:
    """Return the kernels of which a Triton cache has none."""
    sources = "\n".join(path.read_text(encoding="utf-8") for path in KERNELS.glob("*.py"))
    kernels = set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    return sorted(kernels - {path.stem for path in cache.rglob("*.cubin")})


def main() -> None:
    """Check all shards, several at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--shard", type=int, default=5, help="tests per process")
    parser.add_argument("--files", default="", help="regex of the files' names")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all")
    parser.add_argument("--warm", action="store_true")
    asked = parser.parse_args()
    start = time.monotonic()
    deadline = start + asked.limit

    def passed() -> str:
        return f"after {time.monotonic() - start:.0f} s"

    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(asked.jobs) as pool:
        if asked.warm:
            os.environ["TRITON_CACHE_DIR"] = cache
        files = [file for file in SELECTED if re.search(asked.files, file)]
        soon = min(deadline, start + 150)
        trials = [pool.submit(finds, options, 500 + index, soon) for index, options in enumerate((FAST, PLAIN))]
        shards = []
        for file, tests in zip(files, pool.map(lambda file: collect(file, deadline), files), strict=True):
            for first in range(0, len(tests), asked.shard):
                shards.append(Shard(f"{file} {first // asked.shard + 1}", tests[first : first + asked.shard]))
        total = sum(len(shard.tests) for shard in shards)
        print(f"{total} tests in {len(shards)} shards {passed()}", flush=True)
        if asked.warm:
            half = start + asked.limit / 2
            list(pool.map(lambda shard: warmed(shard, half), shards))
            print(f"warm {passed()}; never ran: {', '.join(never_ran(Path(cache))) or 'none'}", flush=True)
        options = next((chosen for chosen, trial in zip((FAST, PLAIN), trials, strict=True) if trial.result()), None)
        if options is None:
            sys.exit(1)
        print(f"the planted error is found with {' '.join(options)}", flush=True)
        shards.sort(key=lambda shard: -shard.seconds)
        places = range(len(shards))
        results = list(
            pool.map(lambda place, options=options: checked(shards[place], options, place, deadline), places)
        )
    tests, errors = sum(result[0] for result in results), sum(result[1] for result in results)
    bad = [shard.name for shard, result in zip(shards, results, strict=True) if not result[2]]
    print(
        f"{tests} of {total} tests passed under the sanitizer, {errors} errors, {passed()}; "
        f"shards not done or with errors: {', '.join(bad) or 'none'}"
    )
    sys.exit(9 if errors else 1 if bad else 0)


if __name__ == "__main__":
    main()
