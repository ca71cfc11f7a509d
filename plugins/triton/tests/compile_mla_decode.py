"""Compile the MLA decode kernels for one target without a GPU, in a process that has no interpreter.

Run ``python compile_mla_decode.py 90``: prints one line per kernel, ``shared memory, tensor-core instructions, name``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_select_triton.kernels import mla_decode
from attn_select_triton.kernels.mla_decode import MLALaunch

POINTERS = {
    "out_ptr": "*bf16", "lse_ptr": "*fp32", "part_ptr": "*fp32", "part_lse_ptr": "*fp32", "table_ptr": "*i32",
    "query_start_loc_ptr": "*i32", "seq_lens_ptr": "*i32", "score_scale": "fp32", "value_scale": "fp32",
}  # fmt: skip
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8e5": torch.float8_e5m2, "fp8e4nv": torch.float8_e4m3fn}
INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")


def padded(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))


def compiled(
    kernel: Any, source: type, constants: dict[str, Any], types: dict[str, str], target: int, **options: Any
) -> str:
    """Return the line of one kernel."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name][0] == "*" or (name.startswith("stride") and name != "stride_table"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        source(kernel, signature, constexprs, attributes), target=GPUTarget("cuda", target, 32), options=options
    )
    products = sum(made.asm["ptx"].count(instruction) for instruction in INSTRUCTIONS)
    return f"{made.metadata.shared} {products}"


def plain(launch: MLALaunch, rank: int, rope: int, page: int, query: str, cache: str, split: bool, target: int) -> str:
    constants: dict[str, Any] = {
        "HEADS": 128, "R": rank, "BLOCK_R": padded(rank), "P": rope, "BLOCK_P": padded(rope), "BLOCK_SIZE": page,
        "CAUSAL": True, "LSE": True, "SPLIT": split, "FIXED": False, "DESCRIBED": launch.described,
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n,
    }  # fmt: skip
    types = {**POINTERS, "q_ptr": f"*{query}", "cache_ptr": f"*{cache}"}
    if launch.described:
        types["latent_descriptor"] = f"tensordesc<{cache}[{launch.block_n}, {rank}]>"
        types["rope_descriptor"] = f"tensordesc<{cache}[{launch.block_n}, {rope}]>"
    else:
        constants |= {"latent_descriptor": None, "rope_descriptor": None}
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return compiled(mla_decode.mla_decode_kernel, ASTSource, constants, types, target, **options)


def hopper(rows: int, rank: int, rope: int, query: str, split: bool) -> str:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from attn_select_triton.kernels.mla_decode_hopper import mla_decode_hopper_kernel

    constants = {
        "HEADS": 128, "R": rank, "BLOCK_SIZE": 64, "CAUSAL": True, "LSE": True, "SPLIT": split, "FIXED": False,
        "ROWS": rows,
    }  # fmt: skip
    types = dict(POINTERS)
    for name, block in (
        ("q_half", [rows, rank // 2]), ("q_rope", [rows, rope]), ("kv_half", [64, rank // 2]), ("kv_rope", [64, rope])
    ):  # fmt: skip
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        types[name] = f"tensordesc<{query}{block},{layout!r}>"
    return compiled(mla_decode_hopper_kernel, GluonASTSource, constants, types, 90, num_warps=4, maxnreg=168)


def lines(target: int) -> Iterator[str]:
    capability = (target // 10, target % 10)
    caches = ["fp16"] if target < 80 else ["bf16", "fp8e5"] if target < 89 else ["bf16", "fp8e4nv"]
    query = caches[0]
    for rows in (16, 128):
        for rank, rope, page in ((512, 64, 64), (512, 64, 16), (512, 128, 64), (48, 48, 64)):
            for cache in caches:
                split = cache == query
                launch = mla_decode.mla_launch(capability, rows, rank, rope, page, TORCH[query], TORCH[cache])
                name = f"{rows} rows, {rank} + {rope}, page {page}, {cache}, {launch}"
                if launch.hopper:
                    for tile in (16, 32, 64):
                        yield f"{hopper(tile, rank, rope, query, split)} {name}, tile {tile}"
                else:
                    yield f"{plain(launch, rank, rope, page, query, cache, split, target)} {name}"


if __name__ == "__main__":
    for line in lines(int(sys.argv[1])):
        print(line, flush=True)
