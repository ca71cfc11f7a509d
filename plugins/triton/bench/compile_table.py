"""Compile the kernels of all shape classes for one GPU that need not be here, and print what each costs and holds.

    python plugins/triton/bench/compile_table.py 90
    python plugins/triton/bench/compile_table.py 90 --save before.json
    python plugins/triton/bench/compile_table.py 90 --against before.json

``--against`` names the kernels whose instructions differ from those that an earlier tree saved: how often each opcode
stands in the PTX. A change that only moves code leaves them alone, so its kernels need no new measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "aot"))

from compile_kernels import compiled
from fake_gpu import pretend
from shape_classes import shape_classes

Kernel = dict[str, Any]  # One kernel of one launch and layer, as ``compile_kernels`` prints it


def main() -> None:
    """Print a table of kernels, the slowest first; or what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=int, help="10 x the compute capability")
    parser.add_argument("--launches", default="", metavar="REGEX", help="only launches whose names match")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare instructions with what was saved")
    asked = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        pretend(asked.target)
        lines = compiled(asked.target, shape_classes(asked.target), launches=asked.launches)
        found = [line for line in lines if "refused" not in line]
    if asked.save:
        asked.save.write_text(json.dumps(found))
    if asked.against:
        compare(found, json.loads(asked.against.read_text()))
        return
    print(f"triton {triton.__version__}, compute capability {asked.target / 10}, one kernel after the other\n")
    print("| kernel | shape classes | compile, s | ptxas, s | size, KiB | instructions | slowest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    kernels: dict[str, list[Kernel]] = {}
    for each in sorted(found, key=lambda each: -each["seconds"]):
        kernels.setdefault(each["kernel"], []).append(each)
    for name, each_of in kernels.items():
        sizes = spread([each["size"] / 1024 for each in each_of], 0)
        print(
            f"| `{name}` | {len(each_of)} | {spread([each['seconds'] for each in each_of], 2)} "
            f"| {spread([each['assembler'] for each in each_of], 2)} | {sizes} "
            f"| {spread([sum(each['opcodes'].values()) for each in each_of], 0)} | {each_of[0]['name']} |"
        )
    print(f"\n{len(found)} kernels, {sum(each['seconds'] for each in found):.1f} s")


def spread(numbers: list[float], digits: int) -> str:
    """Return the least and the greatest number, or the only one."""
    low, high = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def compare(found: list[Kernel], before: list[Kernel]) -> None:
    """Print the kernels whose instructions differ."""
    known: dict[str, list[Kernel]] = {}
    for each in before:
        known.setdefault(described(each), []).append(each)
    same = 0
    for each in found:
        others = known.get(described(each))
        if not others:
            print(f"new: {described(each)}")
            continue
        old, new = others.pop(0)["opcodes"], each["opcodes"]
        if old == new:
            same += 1
            continue
        names = sorted(name for name in {*old, *new} if old.get(name, 0) != new.get(name, 0))
        changes = ", ".join(f"{name} {old.get(name, 0)} -> {new.get(name, 0)}" for name in names)
        print(f"differs: {described(each)}\n    {changes}")
    for each in (each for others in known.values() for each in others):
        print(f"gone: {described(each)}")
    print(f"{same} of {len(found)} kernels have the same instructions")


def described(kernel: Kernel) -> str:
    """Return what a kernel is, of which launch and layer."""
    return f"{kernel['kernel']} of {kernel['name']}: {kernel['layer']}"


if __name__ == "__main__":
    main()
