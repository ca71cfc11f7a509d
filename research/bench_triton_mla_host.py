"""Time what surrounds MLA's kernels on one GPU: the host's part of a decode call, and the operations on the cache.

Run ``python research/bench_triton_mla_host.py``. The host's times are of calls that the GPU keeps up with,
medians of many; ``launches`` are the same launches of compiled kernels by themselves, ``looked up`` the same through
Triton's own lookup. Bandwidths are bytes read and written over
medians of CUDA-graph replays, L2 flushed before each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench_triton_mla import RANK, ROPE, SCALE, Case, Problem, captured

from attn_select import AttentionConfig, select
from attn_select.layer.layouts import MLA
from attn_select.reference.running import impl_of
from attn_select.runtime import Capacity, CommonAttentionMetadata, Outputs, Scales, attention_group, torch_ops
from attn_select.runtime.timer import flushed_times, host_times
from attn_select_triton.kernels import mla_cache
from attn_select_triton.kernels.relaunch import Relaunch

Run = Callable[[], Any]
CALLS, ROUNDS = 20, 30
CASES = [
    Case("H16 B32 S1024", 32, 1024, 16),
    Case("H128 B1 S8192", 1, 8192, 128),
    Case("H16 B32 S1024 p16", 32, 1024, 16, page=16),
    Case("H16 B32 S1024 fp8", 32, 1024, 16, fp8=True),
]


def launches_of(run: Run) -> dict[str, Run]:
    """Return functions that repeat the launches of ``run`` and nothing else."""
    found: list[tuple[Any, Any, tuple[Any, ...]]] = []
    original = Relaunch.__call__

    def note(self: Any, grid: Any, *arguments: Any) -> None:
        found.append((self, grid, arguments))
        original(self, grid, *arguments)

    Relaunch.__call__ = note  # type: ignore[method-assign]
    try:
        run()
    finally:
        Relaunch.__call__ = original  # type: ignore[method-assign]

    def again() -> None:
        for kernel, grid, arguments in found:
            original(kernel, grid, *arguments)

    def looked_up() -> None:
        for kernel, grid, arguments in found:
            kernel._function[grid](*arguments, **kernel._options)

    return {"launches": again, "looked up": looked_up}


def layer_calls(problem: Problem) -> dict[str, Run]:
    """Return the builder's call per step and the layer's call, of a loaded selection."""
    case = problem.case
    config = AttentionConfig(
        num_heads=case.heads, kv_lora_rank=RANK, qk_nope_head_dim=128, qk_rope_head_dim=ROPE, v_head_dim=128,
        kv_cache_dtype="fp8" if case.fp8 else "auto", block_size=case.page,
    )  # fmt: skip
    group = attention_group(select(config, backend="TRITON_MLA"), capacity=Capacity(256, 8192, case.seq_len))
    served = group.backends["decode"]
    common = CommonAttentionMetadata(
        query_start_loc=problem.start_loc,
        query_start_loc_cpu=problem.start_loc.cpu(),
        seq_lens=problem.seq_lens,
        seq_lens_cpu=problem.seq_lens.cpu(),
        num_reqs=case.batch,
        num_actual_tokens=problem.tokens,
        max_query_len=case.query_len,
        max_seq_len=case.seq_len,
        block_table_tensor=problem.table,
    )
    impl: Any = impl_of(served, scale=SCALE)
    metadata = served.builder.build(0, common)

    def forward() -> None:
        impl.forward_mqa(problem.query, problem.cache, metadata, Outputs(problem.output))

    return {"build": lambda: served.builder.build(0, common), "forward_mqa": forward}


def operations(tokens: int, dtype: torch.dtype) -> dict[str, tuple[Run, int]]:
    """Return runs and bytes of the operations on the cache, ours and torch's, beside a plain copy of as many bytes."""
    width, size = RANK + ROPE, 64
    draw = torch.randn(tokens, width, device="cuda").bfloat16()
    cache = torch.zeros(tokens // size, size, width, device="cuda", dtype=dtype)
    out = torch.empty_like(draw)
    slots = torch.randperm(tokens // size, device="cuda").repeat_interleave(size) * size
    slots += torch.arange(tokens, device="cuda") % size
    requests = 32
    table = torch.randperm(tokens // size, device="cuda").int().view(requests, -1)
    start_loc = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * (tokens // requests)
    starts = torch.zeros(requests, device="cuda", dtype=torch.int32)
    scales: Any = Scales.make("cuda")
    config = AttentionConfig(
        num_heads=1, kv_lora_rank=RANK, qk_nope_head_dim=128, qk_rope_head_dim=ROPE, v_head_dim=128,
    )  # fmt: skip
    parts, where = draw.split([RANK, ROPE], -1), (table, starts, start_loc, tokens, size)
    moved = tokens * width * (draw.itemsize + cache.itemsize)
    source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "copy": (lambda: target.copy_(source), moved),
        "concat_and_cache_mla": (lambda: mla_cache.concat_and_cache_mla(*parts, cache, slots, scales.k), moved),
        "  torch's": (lambda: torch_ops.concat_and_cache_mla(*parts, cache, slots, MLA, config, scales), moved),
        "gather_cache_mla": (lambda: mla_cache.gather_cache_mla(cache, out, *where, scales.k), moved),
        "  torch's again": (lambda: torch_ops.gather_cache_mla(cache, out, *where, config, scales), moved),
    }


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for case in CASES:
        problem = Problem(case)
        calls = layer_calls(problem)
        forward = calls["forward_mqa"]
        forward()
        calls |= launches_of(forward)
        times = host_times(calls, CALLS, ROUNDS)
        print(f"{case.name}:", ", ".join(f"{name} {time_:.1f} us" for name, time_ in times.items()), flush=True)
    for tokens, dtype in ((8192, torch.bfloat16), (65536, torch.bfloat16), (65536, torch.float8_e4m3fn)):
        found = operations(tokens, dtype)
        medians = flushed_times({name: captured(run).replay for name, (run, _) in found.items()}, 40)
        print(f"{tokens} tokens, {dtype} cache:")
        for name, median in medians.items():
            print(f"    {name:24s} {median:8.1f} us  {found[name][1] / median / 1e6:6.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
