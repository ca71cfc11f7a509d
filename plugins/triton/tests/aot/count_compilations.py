"""Count what batches of all sizes would compile on one target, without compiling: ``python count_compilations.py 90``.

Prints one line per kernel and set of constants: how many compilations they cost, the kernel and the constants. More
than one means that lengths, batch sizes or slices are compiled into the kernel. Likewise one line per ``Relaunch``,
with how many compilations its calls asked for: more than one means that it launches a kernel of others' arguments.
"""

from __future__ import annotations

import itertools
import sys

import torch
from fake_gpu import noting, pretend
from shape_classes import (
    Tensors,
    attention,
    classic,
    classic_prefill,
    conversions,
    decompressed_prefill,
    fixed_split_decode,
    gather_latents,
    gathered_prefill,
    hopper_prefill,
    latent,
    merge_states,
    paged_prefill,
    plain_hopper_prefill,
    split_decode,
    split_hopper_prefill,
    split_mla_decode,
    version_1,
    version_2,
    whole_decode,
    whole_mla_decode,
    write,
    write_latents,
)

BATCHES = (1, 2, 3, 5, 8, 16, 17, 33, 64)
FIRST = (0, 1, 2, 4)
WIDTHS = (1, 2, 7, 16)
SHAPES = (
    *(
        attention(
            write, split_decode, whole_decode, fixed_split_decode, paged_prefill, gathered_prefill, merge_states,
            conversions, dtype="float16", **shape,
        )
        for shape in (
            {},
            {"num_heads": 71, "num_kv_heads": 1, "head_size": 64, "sliding_window": 64},
            {"num_heads": 3, "num_kv_heads": 3, "head_size": 40, "query_len": 3, "kv_cache_dtype": "fp8_e5m2"},
        )
    ),
    *(
        latent(
            write_latents, gather_latents, split_mla_decode, whole_mla_decode,
            decompressed_prefill, heads=heads, block_size=page, dtype="float16",
        )
        for heads, page in ((1, 64), (16, 64), (71, 16))
    ),
    classic(write, version_1, version_2, classic_prefill, dtype="float16"),
)  # fmt: skip


ON_HOPPER = attention(hopper_prefill, plain_hopper_prefill, split_hopper_prefill, head_size=128, dtype="float16")


def main(target: int) -> None:
    """Run all launchers on all batches, print the counts."""
    torch.set_num_threads(1)
    pretend(target)
    shapes = (*SHAPES, ON_HOPPER) if target == 90 else SHAPES
    with noting() as found:
        for shape, requests, first, width in itertools.product(shapes, BATCHES, FIRST, WIDTHS):
            for launch in shape.launches:
                launch(Tensors(shape, target, requests, first, width))
    with noting() as shifted:
        for shape, shift in itertools.product(SHAPES, (0, 2)):
            for launch in shape.launches:
                launch(Tensors(shape, target, shift=shift))
    # Tensors away from 16 bytes do have kernels of their own, and so must have other ``Relaunch`` objects.
    for key, asked in shifted.items():
        if "relaunch" in key[0]:
            found.setdefault(key, set()).update(asked)
    for (kernel, constants), asked in sorted(found.items()):
        print(len(asked), kernel, constants)


if __name__ == "__main__":
    main(int(sys.argv[1]))
