"""Compile shape classes for one target without a GPU.

    python plugins/triton/tests/aot/compile_kernels.py 90 [--first 1 | --part 0/3 | --once | --random 50 --seed 1]

Prints one line of JSON per kernel (``fake_gpu.Compiled`` with its launch and layer), and one per class that the gate
refuses. ``--first`` takes only so many of the classes, ``--part 0/3`` every third from the first on and of the others
what none before launched, ``--random`` as many as asked for from all that the gates accept. ``--once`` compiles each
kernel of each launcher for the first of its layers alone.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from fake_gpu import compiling, pretend
from shape_classes import ShapeClass, Tensors, random_shape_classes, shape_classes


def compiled(
    target: int, classes: Iterable[ShapeClass], *, part: int = 0, parts: int = 1, once: bool = False, launches: str = ""
) -> Iterator[dict[str, Any]]:
    """Compile shape classes, and give what each line says; of their launches, those whose names match."""
    launched = set()
    known: set[tuple[str, str]] = set()
    launching = ""

    def wanted(kernel: str) -> bool:
        """Whether to compile a kernel again for another layer."""
        again = (launching, kernel) in known
        known.add((launching, kernel))
        return not (again and once)

    with compiling(wanted) as kernels:
        for index, shape in enumerate(classes):
            layer = ", ".join(
                f"{name}={value}" for name, value in shape.config.model_dump(exclude_defaults=True).items()
            )
            layer += f", block size {shape.block_size}, {shape.query_len} query tokens"
            if not shape.accepted(target):
                yield {"refused": layer}
                continue
            for launch in shape.launches:
                if (index % parts != part and launch in launched) or not re.search(launches, launch.__name__):
                    continue
                launched.add(launch)
                launching = launch.__name__
                launch(Tensors(shape, target))
                for kernel in kernels:
                    yield {"name": launching, "layer": layer, **asdict(kernel)}
                kernels.clear()


def main() -> None:
    """Compile, and print what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=int)
    parser.add_argument("--first", type=int)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    pretend(asked.target)
    if asked.random:
        classes = random_shape_classes(asked.target, asked.random, asked.seed)
    else:
        classes = islice(shape_classes(asked.target), asked.first)
    part, parts = map(int, asked.part.split("/"))
    for line in compiled(asked.target, classes, part=part, parts=parts, once=asked.once):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
