"""Check the FlashMLA backends on a GPU against the oracle, then time them against the raw kernels; prints tables.

Run ``python research/bench_flashmla.py [--vllm 0.26.0] [--rounds N]``; ``--vllm`` names the version of a
vLLM without package metadata. Times are medians of interleaved rounds: on the GPU by replaying a graph of 20 calls, on
the host by issuing 50 calls to an idle GPU. The raw call is timed twice, once as its own control.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select import AttentionConfig
from attn_select.layer.config import Phase
from attn_select.machine import detection
from attn_select.machine.environment import Environment
from attn_select.reference.oracle_paged import gather_reference
from attn_select.reference.oracle_quant import pack_fp8_ds_mla, quantize_query
from attn_select.runtime import BlockTable, Capacity, MLAAttention, MLAAttentionGroup, Outputs, Scales, prepare_batch
from attn_select.runtime.cuda_graph import CudaGraphRunner
from attn_select.testing import mla_layer, relative_error, selection_of
from attn_select_flashmla.facts.flashmla import FLASHMLA
from attn_select_flashmla.facts.flashmla_sparse import FLASHMLA_SPARSE

Run = Callable[[], Any]
SCALE = 192**-0.5
CALLS_PER_GRAPH, CALLS_PER_ROUND = 20, 50


class Case:
    """One layer's call, through ``forward_mqa`` and raw, on the same tensors."""

    def __init__(
        self,
        name: str,
        environment: Environment,
        batch: int,
        seq_len: int,
        heads: int,
        query_len: int = 1,
        phase: Phase = "decode",
        **fields: Any,
    ) -> None:
        torch.manual_seed(0)
        self.name, self.query_len, self.phase = name, query_len, phase
        spec_tokens = query_len - 1 if phase == "decode" else 0
        config = mla_layer(num_heads=heads, num_speculative_tokens=spec_tokens, **fields)
        self.config, self.scales = config, Scales.make("cuda", q=0.02, k=0.02)
        self.group = group_for(config, environment, batch, seq_len, query_len)
        table = BlockTable(batch, -(-seq_len // 64), 64, "cuda")
        blocks = torch.randperm(batch * table.host.shape[1]).view(batch, -1)
        for row in range(batch):
            table.set_row(row, blocks[row].tolist())
        self.common = prepare_batch([query_len] * batch, [seq_len] * batch, table)
        self.cache = filled_cache(self.group, blocks.numel())
        tokens = batch * query_len
        self.query = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16)
        self.indices = self._indices(blocks, seq_len, query_len) if config.sparse else None
        weight = torch.zeros(heads * 256, 512, device="cuda", dtype=torch.bfloat16)
        self.layer = MLAAttention(self.group, weight, scale=SCALE, scales=self.scales)
        self.output = torch.empty(tokens, heads, 512, device="cuda", dtype=torch.bfloat16)

    def _indices(self, blocks: Tensor, seq_len: int, query_len: int) -> Tensor:
        """Choose tokens at or before each query's position; what lies beyond is void."""
        top_k = self.config.sparse_top_k or 0
        batch = len(blocks)
        last = torch.arange(seq_len - query_len, seq_len, device="cuda").repeat(batch)
        chosen = torch.randint(0, 1 << 30, (batch * query_len, top_k), device="cuda") % (last.unsqueeze(1) + 1)
        request = torch.arange(batch, device="cuda").repeat_interleave(query_len).unsqueeze(1)
        slots = blocks.cuda()[request, chosen // 64] * 64 + chosen % 64
        slots[torch.arange(top_k, device="cuda") > last.unsqueeze(1)] = -1
        return slots.int()

    def metadata(self, *, capture: bool = False) -> Any:
        build = self.group.build_for_cudagraph_capture if capture else self.group.build
        return build(self.common).parts[0].metadata

    def ours(self, metadata: Any, lse: Tensor | None = None) -> Run:
        impl = self.layer.impls[self.phase]
        arguments = (self.query, self.cache, metadata, Outputs(self.output, lse), self.indices)
        return lambda: impl.forward_mqa(*arguments)

    def error(self) -> tuple[float, float]:
        """Return the relative error of the output and the largest of the LSE, over up to 24 tokens."""
        lse = torch.empty(self.query.shape[:2], device="cuda")
        output = self.ours(self.metadata(), lse)().clone()
        rows = torch.linspace(0, len(output) - 1, min(24, len(output))).long().tolist()
        wanted, wanted_lse = zip(*(self._reference(row) for row in rows), strict=True)
        difference = (lse[rows].double() - torch.stack(wanted_lse)).abs().max()
        return relative_error(output[rows].cpu(), torch.stack(wanted).cpu()).norm, float(difference)

    def _reference(self, row: int) -> tuple[Tensor, Tensor]:
        """Attend in float64, on the GPU since contexts are long."""
        request, token = divmod(row, self.query_len)
        if self.indices is not None:
            slots = self.indices[row][self.indices[row] >= 0]
        else:
            table = self.common.block_table_tensor
            assert table is not None
            length = int(self.common.seq_lens_cpu[request]) - self.query_len + token + 1
            positions = torch.arange(length, device="cuda")
            slots = table[request, positions // 64] * 64 + positions % 64
        layout = self.group.kv_layout or ""
        keys, _ = gather_reference(self.cache, layout, slots.long(), self.config, k_scale=self._k_scale())
        query = self.query[row : row + 1].double()
        if self.group.backends[self.phase].context.plans[self.phase].query_dtype == "fp8_e4m3":
            query = quantize_query(query, "fp8_e4m3", self.scales.q)
        keys = keys.squeeze(1).cuda()
        scores = query[0] @ keys.T * SCALE
        lse = scores.logsumexp(-1)
        return (scores - lse[:, None]).exp() @ keys[:, :512], lse

    def _k_scale(self) -> Tensor | None:
        return self.scales.k if self.config.kv_cache_dtype == "fp8_e4m3" and not self.config.sparse else None


def group_for(
    config: AttentionConfig, environment: Environment, batch: int, seq_len: int, query_len: int
) -> MLAAttentionGroup:
    """Return a group of the backend alone, made for graphs."""
    spec = FLASHMLA_SPARSE if config.sparse else FLASHMLA
    try:
        selection = selection_of(spec, config, detection.detect_device().device, environment=environment)
    except AssertionError as refused:
        raise SystemExit(f"it cannot run here: {refused}") from None
    capacity = Capacity(max(batch, 256), max(batch * query_len, 1024), seq_len)
    return MLAAttentionGroup(selection, "cuda", capacity, cuda_graphs=True, phases=[*selection.backends])


def filled_cache(group: MLAAttentionGroup, blocks: int) -> Tensor:
    """Return a cache of standard normal latents, of e4m3 at a scale of 0.02."""
    cache = group.allocate_kv_cache(blocks)
    for part in cache.split(512):
        numbers = torch.randn(*part.shape[:2], 576, device="cuda")
        if part.dtype == torch.uint8:
            part.copy_(pack_fp8_ds_mla(numbers[..., :512], numbers[..., 512:]))
        elif part.element_size() == 1:
            part.copy_((numbers / 0.02).clamp(-448, 448).to(part.dtype))
        else:
            part.copy_(numbers)
    return cache


def raw_call(case: Case) -> Callable[[Any], Run]:
    """Return a function that makes the raw kernel's call for a schedule, its arguments prepared beforehand."""
    from vllm.third_party.flashmla import flash_mla_interface as interface
    from vllm.v1.attention.ops import flashmla as fp8

    common, heads, config = case.common, case.config.num_heads, case.config
    query = case.query.view(common.num_reqs, case.query_len, heads, 576)
    if case.indices is not None:
        kv, indices, flat = case.cache.unsqueeze(2), case.indices.unsqueeze(1), case.query.unsqueeze(1)
        if config.kv_cache_dtype == "auto":
            kv = case.cache.view(-1, 1, 576)
            out = torch.empty_like(case.output)
            return lambda schedule: lambda: interface.flash_mla_sparse_fwd(case.query, kv, indices, SCALE, 512, out=out)
        options: dict[str, Any] = {"is_fp8_kvcache": True, "indices": indices}
        options["out"] = torch.empty_like(case.output).unsqueeze(1)
        arguments = (flat, kv, None, None, 512)
        return lambda schedule: lambda: interface.flash_mla_with_kvcache(*arguments, schedule, None, SCALE, **options)
    lens, table, kv = common.seq_lens, common.block_table_tensor, case.cache.unsqueeze(2)
    if config.kv_cache_dtype == "fp8_e4m3":
        quantised = (query.float() / case.scales.q).to(torch.float8_e4m3fn)
        one = (case.scales.q.reshape(1), case.scales.k.reshape(1))

        def with_tensors(_: Any) -> Run:
            tiles, splits = fp8.get_mla_metadata_dense_fp8(lens, case.query_len * heads, 1)
            arguments = (quantised, kv, table, lens, 512, tiles, splits, SCALE, True, *one)
            return lambda: fp8.flash_mla_with_kvcache_fp8(*arguments)

        return with_tensors
    into = torch.empty_like(case.output).view(common.num_reqs, 1, case.query_len * heads, 512)
    call = (query, kv, table, lens, 512)
    return lambda schedule: lambda: interface.flash_mla_with_kvcache(*call, schedule, None, SCALE, True, out=into)


def new_raw_schedule() -> Any:
    from vllm.third_party.flashmla import flash_mla_interface as interface

    return interface.get_mla_metadata()[0]


def graph_of(run: Run) -> torch.cuda.CUDAGraph:
    """Capture several calls; the schedule was made before, as in the layers of a model behind the first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            run()
    return graph


def gpu_times(runs: Sequence[Run], rounds: int) -> list[float]:
    """Return the median time per call of each, microseconds."""
    graphs, samples = [graph_of(run) for run in runs], [[] for _ in runs]
    for _ in range(rounds):
        for graph, found in zip(graphs, samples, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / CALLS_PER_GRAPH)
    return [statistics.median(found) for found in samples]


def host_times(runs: Sequence[Run], rounds: int) -> list[float]:
    """Return the median time that the host takes to issue a call of each, microseconds."""
    samples: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, found in zip(runs, samples, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS_PER_ROUND):
                run()
            found.append((time.perf_counter() - begin) * 1e6 / CALLS_PER_ROUND)
    torch.cuda.synchronize()
    return [statistics.median(found) for found in samples]


def cases(environment: Environment) -> list[Case]:
    made: list[Case] = []
    for name, fields in (
        ("dense bf16 B64 S4096 H128", {"batch": 64, "seq_len": 4096, "heads": 128}),
        ("dense bf16 B128 S2048 H16", {"batch": 128, "seq_len": 2048, "heads": 16}),
        ("dense bf16 B1 S4096 H16", {"batch": 1, "seq_len": 4096, "heads": 16}),
        ("dense bf16 q2 B64 S4096 H128", {"batch": 64, "seq_len": 4096, "heads": 128, "query_len": 2}),
        ("dense FP8 B64 S4096 H128", {"batch": 64, "seq_len": 4096, "heads": 128, "kv_cache_dtype": "fp8_e4m3"}),
        ("sparse FP8 B64 S4096 H128", {"batch": 64, "heads": 128, "kv_cache_dtype": "fp8_ds_mla"}),
        ("sparse FP8 B64 S4096 H16", {"batch": 64, "heads": 16, "kv_cache_dtype": "fp8_ds_mla"}),
        ("sparse bf16 B64 S4096 H128", {"batch": 64, "heads": 128}),
        ("sparse bf16 prefill B1 T1024 H128", {"batch": 1, "heads": 128, "query_len": 1024, "phase": "prefill"}),
        (
            "sparse FP8 prefill B1 T1024 H128",
            {"batch": 1, "heads": 128, "query_len": 1024, "phase": "prefill", "kv_cache_dtype": "fp8_ds_mla"},
        ),
        (
            "sparse FP8 prefill B1 T1024 H16",
            {"batch": 1, "heads": 16, "query_len": 1024, "phase": "prefill", "kv_cache_dtype": "fp8_ds_mla"},
        ),
    ):
        given: dict[str, Any] = {"seq_len": 4096, **fields}
        if name.startswith("sparse"):
            given["sparse_top_k"] = 2048
        made.append(Case(name, environment, **given))
    return made


def compare(case: Case, rounds: int) -> str:
    """Return a table row: errors, and GPU and host time of ours, raw and raw again."""
    error, lse = case.error()
    text = f"{case.name:36s} error {error:.1e} LSE {lse:.1e}"
    ours = case.ours(case.metadata())
    padded = case.config.num_heads not in (64, 128) and case.config.sparse
    if padded or (case.phase == "prefill" and case.config.kv_cache_dtype != "auto"):
        gpu, host = gpu_times([ours], rounds)[0], host_times([ours], rounds)[0]
        return f"{text} | GPU {gpu:8.1f} us | host {host:5.1f} us | the raw call takes other shapes"
    make = raw_call(case)
    raw, control = make(new_raw_schedule()), make(new_raw_schedule())
    gpu, host = gpu_times([ours, raw, control], rounds), host_times([ours, raw, control], rounds)
    return (
        f"{text} | GPU {gpu[0]:8.1f} raw {gpu[1]:8.1f} us, ratio {gpu[0] / gpu[1]:.3f} (control {gpu[2] / gpu[1]:.3f})"
        f" | host {host[0]:5.1f} raw {host[1]:5.1f} us, +{host[0] - host[1]:.1f} (control {host[2] - host[1]:+.1f})"
    )


def build_times(environment: Environment) -> None:
    """Print the host time of ``group.build``."""
    for name, fields in (
        ("dense bf16", {}),
        ("dense FP8", {"kv_cache_dtype": "fp8_e4m3"}),
        ("sparse FP8", {"kv_cache_dtype": "fp8_ds_mla", "sparse_top_k": 2048}),
    ):
        found = []
        for batch in (1, 64, 256):
            case = Case(name, environment, batch, 256, 128, **fields)
            found.append(f"B{batch} {host_times([lambda case=case: case.group.build(case.common)], 20)[0]:.1f} us")
        print(f"build {name:12s} {', '.join(found)}", flush=True)
    case = Case("two lengths", environment, 64, 256, 128, query_len=2)
    table = case.common.block_table_tensor
    lens = [1 + request % 2 for request in range(64)]
    common = prepare_batch(lens, [256] * 64, device="cuda")
    mixed = dataclasses.replace(common, block_table_tensor=table)
    builder = case.group.backends["decode"].builder
    print(f"build dense bf16, queries of 1 and 2: B64 {host_times([lambda: builder.build(0, mixed)], 20)[0]:.1f} us")


def replays(environment: Environment, name: str, layers: int = 32, batch: int = 8, **fields: Any) -> None:
    """Replay a decode step of several layers with changing lengths; compare bits with eager runs, and time both."""
    case = Case(name, environment, batch, 8192, 128, **fields)
    group, heads = case.group, 128
    weight = torch.randn(heads * 256, 512, device="cuda", dtype=torch.bfloat16) * 512**-0.5
    stack = [MLAAttention(group, weight, scales=case.scales) for _ in range(layers)]
    query = torch.randn(batch, heads, 192, device="cuda", dtype=torch.bfloat16)
    latent, rope = (torch.randn(batch, size, device="cuda", dtype=torch.bfloat16) for size in (512, 64))
    inputs = {"query": query, "latent": latent, "rope": rope}
    if case.indices is not None:
        inputs["indices"] = case.indices

    def step(given: Any, metadata: Any) -> Tensor:
        output = torch.zeros((), device="cuda")
        for layer in stack:
            own = (given["query"], given["latent"], given["rope"], case.cache, metadata[group])
            output = layer(*own, topk_indices=given.get("indices"))
        return output

    runner = CudaGraphRunner(step, [group], inputs, [batch])
    runner.capture()
    table, equal, worst = case.common.block_table_tensor, [], 0.0
    commons = []
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        lens = torch.randint(1, 8192 if seed % 2 else 200, (batch,), generator=draw).tolist()
        common = prepare_batch([1] * batch, lens, device="cuda")
        assert table is not None
        last = common.seq_lens.long() - 1
        slots = table[torch.arange(batch, device="cuda"), last // 64].long() * 64 + last % 64
        commons.append(dataclasses.replace(common, block_table_tensor=table, slot_mapping=slots))
    for common in [*commons, commons[0]]:
        replayed = runner(inputs, {group: common}).clone()
        eager = step(inputs, {group: group.build(common)})
        equal.append(torch.equal(replayed, eager))
        worst = max(worst, float((replayed - eager).float().norm() / eager.float().norm()))
    times = []
    for run in (lambda: runner(inputs, {group: commons[1]}), lambda: step(inputs, {group: group.build(commons[1])})):
        samples = []
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - begin) * 1e3)
        times.append(statistics.median(samples))
    print(
        f"{layers} layers at batch {batch}, {name}: graph {times[0]:.2f} ms, eager {times[1]:.2f} ms, "
        f"{times[1] / times[0]:.2f} times as fast; {sum(equal)} of {len(equal)} replays equal to the bit, "
        f"largest difference {worst:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", help="version of a vLLM without package metadata")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    environment = Environment(pins={"vllm": arguments.vllm} if arguments.vllm else {})
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    with torch.no_grad():
        for case in cases(environment):
            print(compare(case, arguments.rounds), flush=True)
        build_times(environment)
        replays(environment, "dense bf16")
        replays(environment, "dense FP8", kv_cache_dtype="fp8_e4m3")
        replays(environment, "sparse FP8", kv_cache_dtype="fp8_ds_mla", sparse_top_k=2048)


if __name__ == "__main__":
    main()
