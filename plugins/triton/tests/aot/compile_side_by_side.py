"""Compile one layer's kernels as ``AttentionGroup.warm_up`` does: ``python compile_side_by_side.py 90``.

Prints a line for each kernel as it is done: how many are, how many are known, and its name. Then ``again`` and how many
a second pass compiles.
"""

from __future__ import annotations

import sys

from fake_gpu import pretend
from shape_classes import Tensors, attention, paged_prefill, split_decode, write

from attn_select_triton.runtime.side_by_side import compiling

target = int(sys.argv[1])
pretend(target)
layer = attention(write, split_decode, paged_prefill, dtype="float16")


def told() -> list[tuple[str, int, int]]:
    """Launch everything once, in the context that compiles and runs nothing, and return what it told."""
    found: list[tuple[str, int, int]] = []
    with compiling(lambda *each: found.append(each)):
        for launch in layer.launches:
            launch(Tensors(layer, target))
    return found


for name, done, known in told():
    print(done, known, name)
print("again", len(told()))
