"""Time the first call of shape classes: with Triton's cache empty, and in a later process that finds it filled.

    python plugins/triton/bench/first_call.py [--cases REGEX]

Each time is one process's: forked from one that has imported torch, Triton and the kernels, it starts CUDA, makes the
tensors, and then times one launcher from the call until the device is done. Left out are imports, the start of CUDA,
and ``hash``, which Triton takes once per process to hash its own 415 MB library for its cache's keys: ``load()`` of a
backend begins it in a thread (``attn_select_triton/hashing.py``), and a first call before that is done takes up to so
much more. The requests are empty, so the kernels themselves take no time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import triton

import attn_select_triton.kernels.mla_decode_hopper  # noqa: F401  (the builder's import)
from attn_select.machine.detection import detect_device
from attn_select_triton.runtime.hashing import begin_hashing

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not start CUDA before the fork
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "aot"))

import fake_gpu


def _zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


fake_gpu.tensor = _zeros  # the shape classes, on a GPU that is there

import shape_classes  # noqa: E402


def cases(target: int) -> Iterator[tuple[str, shape_classes.ShapeClass, int]]:
    """Yield a name, the layer, and which of its launches."""
    for shape in shape_classes.shape_classes(target):
        config = shape.config
        size = f"{config.kv_lora_rank}+{config.qk_rope_head_dim}" if config.kv_lora_rank else f"d{config.head_size}"
        for index, launch in enumerate(shape.launches):
            layer = f"{config.num_heads}/{config.num_kv_heads} {size} p{shape.block_size} {config.cache_dtype}"
            yield f"{launch.__name__} {layer}{' all terms' if config.alibi else ''}", shape, index


def _in_child(shape: shape_classes.ShapeClass, index: int, folder: str) -> dict[str, float]:
    """Return seconds of Triton's hash, of the first call and of the second, from a process of its own."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        status = 1
        try:
            os.environ["TRITON_CACHE_DIR"] = folder
            target = int("{}{}".format(*torch.cuda.get_device_capability()))
            torch.set_num_threads(1)
            detect_device()  # asked before, and cached
            start = time.perf_counter()
            if (thread := begin_hashing()) is not None:
                thread.join()
            said = {"hash": time.perf_counter() - start}
            for name in ("first", "second"):
                tensors = shape_classes.Tensors(shape, target)
                torch.cuda.synchronize()
                start = time.perf_counter()
                shape.launches[index](tensors)
                torch.cuda.synchronize()
                said[name] = time.perf_counter() - start
            os.write(write, json.dumps(said).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with open(read) as pipe:
        said = json.loads(pipe.read() or "{}")
    os.waitpid(child, 0)
    return said


def main() -> None:
    """Print one line per shape class, slowest first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="")
    parser.add_argument("--target", type=int, default=90, help="of the GPU: 10 x its compute capability")
    asked = parser.parse_args()
    found = []
    for name, shape, index in cases(asked.target):
        if not re.search(asked.cases, name) or not shape.accepted(asked.target):
            continue
        folder = tempfile.mkdtemp()
        empty, filled = _in_child(shape, index, folder), _in_child(shape, index, folder)
        shutil.rmtree(folder)
        if empty and filled:
            found.append((empty["first"], filled["first"], filled["hash"], filled["second"], name))
        else:
            print("FAILED", name)
    print(
        f"torch {torch.__version__}, triton {triton.__version__}; seconds: cache empty, filled, hash, second call (ms)"
    )
    for empty, filled, hashed, second, name in sorted(found, reverse=True):
        print(f"{empty:6.2f} {filled:6.2f} {hashed:6.2f} {second * 1e3:7.3f}  {name}")


if __name__ == "__main__":
    main()
