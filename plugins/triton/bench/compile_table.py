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
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "aot"))

from fake_gpu import compiling, pretend
from shape_classes import Tensors, shape_classes


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of one shape class: ``launch`` and ``layer`` say which; all else as ``fake_gpu.Compiled`` has it."""

    kernel: str
    launch: str
    layer: str
    seconds: float
    assembler: float
    size: int
    opcodes: dict[str, int]


def compiled(target: int, wanted: str) -> Iterator[Kernel]:
    """Compile all shape classes whose launch matches ``wanted``, one kernel after the other."""
    with compiling() as found:
        for shape in shape_classes(target):
            if not shape.accepted(target):
                continue
            layer = ", ".join(
                f"{name}={value}" for name, value in shape.config.model_dump(exclude_defaults=True).items()
            )
            layer += f", block size {shape.block_size}, {shape.query_len} query tokens"
            for launch in shape.launches:
                if re.search(wanted, launch.__name__):
                    launch(Tensors(shape, target))
                for one in found:
                    yield Kernel(
                        one.kernel, launch.__name__, layer, one.seconds, one.assembler, one.size, one.opcodes
                    )  # fmt: skip
                found.clear()


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
        found = list(compiled(asked.target, asked.launches))
    if asked.save:
        asked.save.write_text(json.dumps([asdict(each) for each in found]))
    if asked.against:
        compare(found, [Kernel(**each) for each in json.loads(asked.against.read_text())])
        return
    print(f"triton {triton.__version__}, compute capability {asked.target / 10}, one kernel after the other\n")
    print("| kernel | shape classes | compile, s | ptxas, s | size, KiB | instructions | slowest |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    kernels: dict[str, list[Kernel]] = {}
    for each in sorted(found, key=lambda each: -each.seconds):
        kernels.setdefault(each.kernel, []).append(each)
    for name, each_of in kernels.items():
        sizes = spread([each.size / 1024 for each in each_of], 0)
        print(
            f"| `{name}` | {len(each_of)} | {spread([each.seconds for each in each_of], 2)} "
            f"| {spread([each.assembler for each in each_of], 2)} | {sizes} "
            f"| {spread([sum(each.opcodes.values()) for each in each_of], 0)} | {each_of[0].launch} |"
        )
    print(f"\n{len(found)} kernels, {sum(each.seconds for each in found):.1f} s")


def spread(numbers: list[float], digits: int) -> str:
    """Return the least and the greatest number, or the only one."""
    low, high = f"{min(numbers):.{digits}f}", f"{max(numbers):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def compare(found: list[Kernel], before: list[Kernel]) -> None:
    """Print the kernels whose instructions differ."""
    known: dict[tuple[str, str, str], list[Kernel]] = {}
    for each in before:
        known.setdefault((each.kernel, each.launch, each.layer), []).append(each)
    same = 0
    for each in found:
        others = known.get((each.kernel, each.launch, each.layer))
        if not others:
            print(f"new: {each.kernel} of {each.launch}: {each.layer}")
            continue
        other = others.pop(0)
        if other.opcodes == each.opcodes:
            same += 1
            continue
        names = sorted(name for name in {*other.opcodes, *each.opcodes} if _of(other, name) != _of(each, name))
        changes = ", ".join(f"{name} {_of(other, name)} -> {_of(each, name)}" for name in names)
        print(f"differs: {each.kernel} of {each.launch}: {each.layer}\n    {changes}")
    for each in (each for others in known.values() for each in others):
        print(f"gone: {each.kernel} of {each.launch}: {each.layer}")
    print(f"{same} of {len(found)} kernels have the same instructions")


def _of(kernel: Kernel, name: str) -> int:
    return kernel.opcodes.get(name, 0)


if __name__ == "__main__":
    main()
