"""Measure FLASHINFER_MLA on one GPU: checked against float64 first, then timed against FlashInfer's own wrapper.

Run ``python research/bench_flashinfer_mla.py [--parts check,decode,build,prefill,peers,replay]``. Times
are medians of interleaved rounds: on the GPU by replaying a graph of 20 calls, on the host by issuing 50 calls to an
idle GPU. The raw call is timed twice, once as its own control. ``peers`` times vLLM's FA3 and FlashMLA kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_select import AttentionConfig
from attn_select.machine.detection import detect_device
from attn_select.machine.environment import Environment
from attn_select.runtime import (
    BlockTable,
    Capacity,
    MLAAttention,
    MLAAttentionGroup,
    Outputs,
    Scales,
    VarlenMetadata,
    prepare_batch,
)
from attn_select.runtime.cuda_graph import CudaGraphRunner
from attn_select.runtime.timer import Call, gpu_times, host_times
from attn_select.testing import relative_error
from attn_select.testing.toolkit import outcomes, plans_of, selection_for
from attn_select_flashinfer.facts.mla import FLASHINFER_MLA

DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "block_size": 64}
SCALE, RANK = 192**-0.5, 512
GPU, HOST = {"repeat": 20, "rounds": 15}, {"repeat": 50, "rounds": 15}
"""Of ``gpu_times`` and ``host_times``."""
SHAPES = {"B64 S4096 H128": (64, 4096, 128), "B128 S2048 H16": (128, 2048, 16), "B1 S32768 H128": (1, 32768, 128)}
BF16 = torch.bfloat16


class Case:
    """Decodes of one layer, through our layer and through a wrapper of FlashInfer's, on the same tensors."""

    def __init__(self, shape: str, kernel: str, *, graphs: bool = True, query_len: int = 1, **fields: Any) -> None:
        torch.manual_seed(0)
        self.batch, self.seq_len, heads = SHAPES[shape]
        self.name = f"{kernel} {fields.get('kv_cache_dtype', 'bf16')} {shape}" + (
            f" q{query_len}" if query_len > 1 else ""
        )
        self.kernel, self.query_len = kernel, query_len
        self.config = AttentionConfig(num_heads=heads, **DIMS, num_speculative_tokens=query_len - 1, **fields)
        options = FLASHINFER_MLA.options(decode_kernel=kernel, prefill_kernel=kernel)
        machine = (detect_device().device, Environment(), options)
        plans = plans_of(outcomes(FLASHINFER_MLA, self.config, *machine))
        selection = selection_for(FLASHINFER_MLA, plans, self.config, *machine)
        assert selection is not None
        capacity = Capacity(max(self.batch, 128), 8192, self.seq_len)
        self.group: Any = MLAAttentionGroup(selection, "cuda", capacity, cuda_graphs=graphs)
        blocks = torch.randperm(self.batch * (self.seq_len // 64)).view(self.batch, -1)
        self.table = BlockTable(self.batch, self.seq_len // 64, 64, "cuda")
        for row in range(self.batch):
            self.table.set_row(row, blocks[row].tolist())
        self.common = prepare_batch([query_len] * self.batch, [self.seq_len] * self.batch, self.table)
        self.cache = self.group.allocate_kv_cache(blocks.numel())
        self.fp8 = self.cache.element_size() == 1
        for part in self.cache.split(512):
            numbers = torch.randn(part.shape, device="cuda")
            part.copy_((numbers / 0.02).clamp(-448, 448) if self.fp8 else numbers)
        self.query = torch.randn(self.batch * query_len, heads, 576, device="cuda", dtype=BF16)
        self.output = torch.empty(self.batch * query_len, heads, RANK, device="cuda", dtype=BF16)
        self.scales = Scales.make("cuda", q=0.02, k=0.02)
        weight = torch.zeros(heads * 256, RANK, device="cuda", dtype=BF16)
        self.layer = MLAAttention(self.group, weight, scale=SCALE, scales=self.scales)
        self.served = self.group.backends["decode"]

    def metadata(self) -> Any:
        builder = self.served.builder
        if self.group.cuda_graphs:
            return builder.build_for_cudagraph_capture(self.common)
        return builder.build(0, self.common)

    def ours(self, metadata: Any, lse: Tensor | None = None) -> Call:
        impl: Any = self.layer.impls["decode"]
        arguments = (self.query, self.cache, metadata, Outputs(self.output, lse))
        return lambda: impl.forward_mqa(*arguments)

    def lists(self) -> dict[str, Any]:
        """Return what a plan takes, as an engine would have it: host lists pinned, page indices on the device."""
        pages = self.seq_len // 64
        made = [torch.arange(self.batch + 1) * self.query_len, torch.arange(self.batch + 1) * pages]
        queries, bounds, lens = (each.int().pin_memory() for each in (*made, torch.full((self.batch,), self.seq_len)))
        assert self.common.block_table_tensor is not None
        indices = self.common.block_table_tensor.flatten().contiguous()
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        return dict(zip(names, (queries, bounds, indices, lens), strict=True))

    def raw(self) -> tuple[Call, Call]:
        """Return FlashInfer's run and plan."""
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=self.kernel)
        lists, sizes = (
            self.lists(),
            (self.config.num_heads, RANK, 64, 64, self.query_len > 1, SCALE, BF16, self.cache.dtype),
        )

        def plan() -> None:
            wrapper.plan(*lists.values(), *sizes)

        plan()
        parts = (*self.query.split([RANK, 64], dim=-1), *self.cache.split([RANK, 64], dim=-1))
        out = torch.empty_like(self.output)
        scales = {"ckv_scale": 0.02, "kpe_scale": 0.02} if self.fp8 else {}
        return lambda: wrapper.run(*parts, out=out, **scales), plan

    def error(self) -> tuple[float, float]:
        """Return the relative error of the output and the largest of the LSE over some tokens."""
        lse = torch.empty(self.query.shape[:2], device="cuda")
        output = self.ours(self.metadata(), lse)().clone()
        worst = off = 0.0
        assert self.common.block_table_tensor is not None
        for token in torch.linspace(0, len(output) - 1, min(12, len(output))).long().tolist():
            request, row = divmod(token, self.query_len)
            blocks = self.common.block_table_tensor[request].long()
            keys = self.cache[blocks].double().flatten(0, 1)[: self.seq_len - self.query_len + row + 1]
            keys = keys * (0.02 if self.fp8 else 1.0)
            scores = self.query[token].double() @ keys.T * SCALE
            wanted_lse = scores.logsumexp(-1)
            wanted = (scores - wanted_lse[:, None]).exp() @ keys[:, :RANK]
            worst = max(worst, relative_error(output[token].cpu(), wanted.cpu()).norm)
            off = max(off, float((lse[token] - wanted_lse).abs().max()))
        return worst, off


def cases(**options: Any) -> list[Case]:
    made = [Case(shape, kernel, **options) for kernel in ("fa3", "fa2") for shape in SHAPES]
    made.append(Case("B64 S4096 H128", "fa3", kv_cache_dtype="fp8_e4m3", **options))
    made.append(Case("B128 S2048 H16", "fa3", query_len=4, **options))
    return made


def check() -> None:
    for case in cases():
        error, off = case.error()
        print(f"check {case.name:28s} output {error:.1e}, LSE {off:.1e}", flush=True)


def compared(runs: Sequence[Call]) -> str:
    """Return GPU and host times of raw, ours and raw again."""
    calls = dict(enumerate(runs))
    gpu, host = gpu_times(calls, **GPU), host_times(calls, **HOST)
    return (
        f"GPU raw {gpu[0]:7.1f} us, ours x{gpu[1] / gpu[0]:.3f}, raw again x{gpu[2] / gpu[0]:.3f} | "
        f"host raw {host[0]:5.1f} us, ours {host[1] - host[0]:+.1f}, raw again {host[2] - host[0]:+.1f}"
    )


def decode() -> None:
    for case in cases():
        (raw, _), (again, _) = case.raw(), case.raw()
        print(f"decode {case.name:28s} {compared([raw, case.ours(case.metadata()), again])}", flush=True)


def build() -> None:
    for graphs in (False, True):
        for shape in SHAPES:
            case = Case(shape, "fa3", graphs=graphs)
            (_, plan), kind = case.raw(), "graph" if graphs else "eager"
            case.metadata()
            calls = {"plan": plan, "build": partial(case.backends.builder.build, 0, case.common)}
            one, two = host_times(calls, repeat=10, rounds=15).values()
            print(f"build  {kind} {shape:16s} host: plan {one:6.1f} us, ours {two - one:+.1f}", flush=True)


def prefill() -> None:
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    tokens, heads = 4 * 2048, 16
    query, key = (torch.randn(tokens, heads, 192, device="cuda", dtype=BF16) for _ in range(2))
    value = torch.randn(tokens, heads, 256, device="cuda", dtype=BF16)[..., 128:]
    bounds = (torch.arange(5) * 2048).int()
    lists = (bounds.cuda(), bounds, bounds.cuda(), bounds, 2048, 2048, True, torch.zeros(4, dtype=torch.int32), True)
    for kernel in ("fa3", "fa2"):
        case = Case("B128 S2048 H16", kernel)
        output, out = (torch.empty(tokens, heads, 128, device="cuda", dtype=BF16) for _ in range(2))
        impl: Any = case.layer.impls["prefill"]
        metadata = case.group.backends["prefill"].builder.build_prefill(VarlenMetadata(*lists))
        workspace = torch.empty(394 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=kernel)
        sizes = {"head_dim_qk": 192, "head_dim_vo": 128, "causal": True, "sm_scale": SCALE, "q_data_type": BF16}
        wrapper.plan(bounds, bounds, heads, heads, **sizes)
        ours = partial(impl.forward_mha, case.layer, query, key, value, metadata, output)
        raw = partial(wrapper.run, query, key, value, out=out)
        text = compared([raw, ours, raw])
        print(f"prefill {kernel} B4 S2048 H16 {text} | equal: {torch.equal(output, out)}", flush=True)


def peers() -> None:
    from vllm.third_party.flashmla import flash_mla_interface as flashmla
    from vllm.vllm_flash_attn import flash_attn_interface as fa

    for shape in SHAPES:
        case = Case(shape, "fa3")
        common = case.common
        latent, rope = case.cache.unsqueeze(2).split([RANK, 64], dim=-1)
        latent_query, rope_query = case.query.split([RANK, 64], dim=-1)
        options: dict[str, Any] = {
            "max_seqlen_q": 1,
            "cu_seqlens_q": common.query_start_loc,
            "max_seqlen_k": case.seq_len,
            "seqused_k": common.seq_lens,
            "block_table": common.block_table_tensor,
            "softmax_scale": SCALE,
            "causal": True,
            "fa_version": 3,
            "out": torch.empty_like(case.output),
        }
        cache = (case.cache.unsqueeze(2), common.block_table_tensor, common.seq_lens, RANK)
        schedule = (flashmla.get_mla_metadata()[0], None, SCALE, True)
        runs: dict[str, Call] = {
            "ours fa3": case.ours(case.metadata()),
            "FA3 (q_v)": partial(fa.flash_attn_varlen_func, rope_query, rope, latent, q_v=latent_query, **options),
            "FlashMLA": partial(flashmla.flash_mla_with_kvcache, case.query.unsqueeze(1), *cache, *schedule),
        }
        times = gpu_times(runs, **GPU).items()
        print(f"peers  {shape}: {', '.join(f'{name} {us:.1f} us' for name, us in times)}", flush=True)


class Steps:
    """A decode step of several layers, as a graph for every size of a list and eagerly."""

    SIZES = (1, 2, 4, 8, 16, 32, 64, 128)

    def __init__(self, kernel: str, layers: int = 32, **fields: Any) -> None:
        self.case = Case("B128 S2048 H16", kernel, **fields)
        weight = torch.randn(16 * 256, RANK, device="cuda", dtype=BF16) * RANK**-0.5
        self.stack = [MLAAttention(self.case.group, weight, scales=self.case.scales) for _ in range(layers)]
        shapes = {"query": (16, 192), "latent": (RANK,), "rope": (64,)}
        self.inputs = {name: torch.randn(128, *shape, device="cuda", dtype=BF16) for name, shape in shapes.items()}
        self.runner = CudaGraphRunner(self._step, [self.case.group], self.inputs, self.SIZES)
        self.runner.capture()

    def _step(self, given: Any, metadata: Any) -> Tensor:
        output = torch.empty(0)
        for layer in self.stack:
            arguments = (given["query"], given["latent"], given["rope"], self.case.cache)
            output = layer(*arguments, metadata[self.case.group])
        return output

    def replayed(self, common: Any) -> Tensor:
        return self.runner(self._given(common), {self.case.group: common})

    def eager(self, common: Any) -> Tensor:
        return self._step(self._given(common), {self.case.group: self.case.group.build(common)})

    def _given(self, common: Any) -> dict[str, Tensor]:
        return {name: tensor[: common.num_reqs] for name, tensor in self.inputs.items()}

    def batch(self, size: int, seed: int) -> Any:
        """Return requests of random rows and lengths."""
        draw = torch.Generator().manual_seed(seed)
        for row, other in enumerate(torch.randperm(128, generator=draw)[:size].tolist()):
            self.case.table.swap_rows(row, other)
        lens = torch.randint(1, 2048 if seed % 2 else 200, (size,), generator=draw).tolist()
        return prepare_batch([1] * size, lens, self.case.table)


def replay() -> None:
    """Replay with changing lengths and pages for every size of a list, and compare with eager runs."""
    for kernel, fields in (("fa3", {}), ("fa2", {}), ("fa3", {"kv_cache_dtype": "fp8_e4m3"})):
        steps, equal, worst, done = Steps(kernel, **fields), 0, 0.0, 0
        for size in Steps.SIZES:
            for seed in range(4):
                common = steps.batch(max(1, size - seed % 2), seed)
                replayed = steps.replayed(common).clone()
                eager = steps.eager(common)
                equal, done = equal + torch.equal(replayed, eager), done + 1
                worst = max(worst, float((replayed - eager).float().norm() / eager.float().norm()))
        common, times = steps.batch(8, 1), []
        for run in (steps.replayed, steps.eager):
            samples = []
            for _ in range(15):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                run(common)
                torch.cuda.synchronize()
                samples.append((time.perf_counter() - begin) * 1e3)
            times.append(statistics.median(samples))
        print(
            f"replay {kernel} {steps.case.cache.dtype}, 32 layers, sizes {Steps.SIZES}: {equal} of {done} equal to the "
            f"bit, largest difference {worst:.1e}; batch 8: graph {times[0]:.2f} ms, eager {times[1]:.2f} ms",
            flush=True,
        )


PARTS = {each.__name__: each for each in (check, decode, build, prefill, peers, replay)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    for part in arguments.parts.split(","):
        PARTS[part]()


if __name__ == "__main__":
    main()
