"""Measure FLASH_ATTN and FLASH_ATTN_MLA on one GPU: checked against the oracle first, then timed, interleaved, medians.

Run ``python research/bench_flash_attn.py [--parts check,overhead,...] [--with NAME==VERSION]``.

Parts: ``check`` (against float64), ``overhead`` (raw call, raw call again as a control, our layer: GPU time by graph
replay, host time), ``build`` (host time), ``graph`` (a decode step of 32 layers, eager and replayed), ``cascade``
(against the plain path, with the break-even), ``mla`` (overhead of the latent decode).
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from random_step import RandomStep

from attn_select import AttentionConfig, Environment, select
from attn_select.machine.environment import parse_pins
from attn_select.runtime import (
    Attention,
    MLAAttention,
    Outputs,
    ops,
)
from attn_select.runtime.batch import prepare_batch
from attn_select.runtime.cuda_graph import CudaGraphRunner
from attn_select.runtime.timer import Call, gpu_times, host_times

BF16 = torch.bfloat16
LLAMA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, block_size=16)
DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "block_size": 64}
CASES = (("decode B64 S4096", 64, 1, 4096), ("decode B8 S16384", 8, 1, 16384), ("decode B256 S1024", 256, 1, 1024),
         ("prefill B4 S4096", 4, 4096, 4096))  # fmt: skip
MLA_CASES = (("MLA B64 S4096 H128", 128, 64, 4096), ("MLA B128 S2048 H16", 16, 128, 2048))


class Bench(RandomStep):
    """One batch of layers that one of the plugin's backends serves."""

    def __init__(
        self, config: AttentionConfig, environment: Environment | None, *step: Any, graphs: bool = False
    ) -> None:
        backend = "FLASH_ATTN_MLA" if config.mla else "FLASH_ATTN"
        super().__init__(select(config, backend=backend, environment=environment), *step, graphs=graphs)

    def error_of_layer(self, prefix: int = 0) -> float:
        """Return the error of a layer, with a cascade where there is a prefix, also where it does not pay."""
        if prefix:
            self.group.distinct[0].builder.least_cascade_bytes = 0
        return self.error(Attention(self.group, caller_writes=True), self.group.build(self.common, prefix))


def check(environment: Environment | None) -> None:
    print("\ncheck: worst relative error of rows against float64")
    for name, batch, query_len, seq_len in CASES:
        bench = Bench(LLAMA, environment, [query_len] * batch, [seq_len] * batch)
        print(f"  {name:24s} {bench.error_of_layer():.1e}")
    lens = [1, 1, 700, 33, 1, 256]
    seq_lens = [5000, 17, 700, 1033, 4096, 3000]
    bench = Bench(LLAMA, environment, lens, seq_lens)
    print(f"  {'mixed':24s} {bench.error_of_layer():.1e}")
    bench = Bench(LLAMA, environment, [1] * 16, [4096 + 50 * i for i in range(1, 17)], 4096)
    print(f"  {'cascade B16 P4096':24s} {bench.error_of_layer(4096):.1e}")


def raw_call(bench: Bench, layer: Attention, output: torch.Tensor, schedule: bool) -> Call:
    """Return the provider's function with views and arguments made beforehand."""
    impl: Any = layer.impls["decode"]
    part = bench.group.build(bench.common, fast_build=not schedule).parts[0].metadata
    key, value = impl._views(bench.cache)
    adapter = impl._adapter
    given = {**impl._layer, **part.arguments, "return_softmax_lse": False}
    if adapter.build.out.value:
        given["out"] = output
    return lambda: adapter.function(bench.query, key, value, **given)


def overhead(environment: Environment | None) -> None:
    print(
        "\noverhead: GPU time by graph replay in us (raw, raw again, raw with a schedule, our layer); host time in us"
    )
    for name, batch, query_len, seq_len in CASES:
        bench = Bench(LLAMA, environment, [query_len] * batch, [seq_len] * batch)
        layer, metadata = Attention(bench.group, caller_writes=True), bench.group.build(bench.common)
        plain = bench.group.build(bench.common, fast_build=True)
        raw = raw_call(bench, layer, bench.output, False)
        found = gpu_times(
            {
                "raw": raw,
                "again": raw_call(bench, layer, bench.output, False),
                "scheduled": raw_call(bench, layer, bench.output, True),
                "plain": partial(layer, bench.query, None, None, bench.cache, plain, bench.output),
                "ours": partial(layer, bench.query, None, None, bench.cache, metadata, bench.output),
            }
        )
        ratios = [found[key] / found["raw"] for key in ("again", "scheduled", "plain", "ours")]
        print(
            f"  {name:20s} raw {found['raw']:8.1f}  again x{ratios[0]:.3f}  scheduled x{ratios[1]:.3f}  ours without "
            f"schedule x{ratios[2]:.3f}  ours x{ratios[3]:.3f}"
        )
    bench = Bench(LLAMA, environment, [1] * 8, [256] * 8)
    layer, metadata = Attention(bench.group, caller_writes=True), bench.group.build(bench.common)
    impl, part, outputs = layer.impls["decode"], metadata.parts[0].metadata, Outputs(bench.output)
    raw, again = raw_call(bench, layer, bench.output, True), raw_call(bench, layer, bench.output, True)
    with torch.inference_mode():
        host = host_times(
            {
                "raw": raw,
                "impl.forward": lambda: impl.forward(bench.query, None, None, bench.cache, part, outputs),
                "layer": lambda: layer(bench.query, None, None, bench.cache, metadata, bench.output),
                "layer.forward": lambda: layer.forward(bench.query, None, None, bench.cache, metadata, bench.output),
                "again": again,
            }
        )
    print("  host, decode B8: " + "  ".join(f"{key} {value:.1f}" for key, value in host.items()))


def build(environment: Environment | None) -> None:
    print("\nbuild: host time in us of group.build (with schedule, fast_build)")
    for batch in (1, 64, 256):
        bench = Bench(LLAMA, environment, [1] * batch, [1024] * batch)
        graphs = Bench(LLAMA, environment, [1] * batch, [1024] * batch, graphs=True)
        host = host_times(
            {
                "build": partial(bench.group.build, bench.common),
                "fast_build": partial(bench.group.build, bench.common, fast_build=True),
                "for graphs": partial(graphs.group.build, graphs.common),
                "prepare_batch": partial(prepare_batch, bench.query_lens, bench.seq_lens, bench.table),
            }
        )  # fmt: skip
        print(f"  B{batch}: " + "  ".join(f"{key} {value:.1f}" for key, value in host.items()))


def graph(environment: Environment | None) -> None:
    layers, batch = 32, 8
    bench = Bench(LLAMA, environment, [1] * batch, [2048] * batch, graphs=True)
    stack = [Attention(bench.group, caller_writes=True) for _ in range(layers)]
    caches = [bench.cache.clone() for _ in stack]
    inputs = {"query": bench.query, "key": torch.randn(batch, 8, 128, device="cuda", dtype=BF16)}
    inputs["value"] = torch.randn_like(inputs["key"])

    def step(given: Mapping[str, Any], metadata: Mapping[Any, Any]) -> Any:
        hidden = given["query"]
        for layer, cache in zip(stack, caches, strict=True):
            hidden = layer(hidden, given["key"], given["value"], cache, metadata[bench.group])
        return hidden

    runner = CudaGraphRunner(step, [bench.group], inputs, [batch])
    with torch.inference_mode():
        runner.capture()
        equal = True
        for seed in range(5):
            lens = torch.randint(1, 2048, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
            common = prepare_batch([1] * batch, lens, bench.table)
            replayed = runner(inputs, {bench.group: common}).clone()
            eager = step(inputs, {bench.group: bench.group.build(common)})
            close = float((replayed.float() - eager.float()).norm() / eager.float().norm())
            equal &= close < 5e-3
            print(f"  lengths {min(lens)}..{max(lens)}: bitwise {torch.equal(replayed, eager)}, off by {close:.1e}")

        def wall(call: Call) -> float:
            samples = []
            for _ in range(40):
                torch.cuda.synchronize()
                began = time.perf_counter()
                call()
                torch.cuda.synchronize()
                samples.append((time.perf_counter() - began) * 1e3)
            return statistics.median(samples[5:])

        free = Bench(LLAMA, environment, [1] * batch, [2048] * batch)
        own = [Attention(free.group, caller_writes=True) for _ in range(layers)]

        def eager_step() -> None:
            metadata, hidden = free.group.build(common), inputs["query"]
            for layer, cache in zip(own, caches, strict=True):
                hidden = layer(hidden, inputs["key"], inputs["value"], cache, metadata)

        eager_ms, replay_ms = wall(eager_step), wall(lambda: runner(inputs, {bench.group: common}))
    print(f"graph: {layers} layers, B{batch}: eager {eager_ms:.2f} ms, replay {replay_ms:.2f} ms, "
          f"x{eager_ms / replay_ms:.1f}; outputs agree: {equal}")  # fmt: skip


def cascade(environment: Environment | None) -> None:
    print("\ncascade: GPU time in us of the plain path and of prefix, rest and merge; 128 tokens of own context")
    print(f"  merge_attn_states by {ops.implementation('merge_attn_states', torch.device('cuda', 0))[1]}")
    for batch in (8, 16, 32, 64, 128):
        for prefix in (256, 512, 1024, 2048, 4096, 8192):
            bench = Bench(LLAMA, environment, [1] * batch, [prefix + 128] * batch, prefix)
            layer, builder = Attention(bench.group, caller_writes=True), bench.group.distinct[0].builder
            impl: Any = layer.impls["decode"]
            made = {"plain": builder.build(0, bench.common), "cascade": builder.build(prefix, bench.common)}
            calls: dict[str, Call] = {
                name: partial(impl.forward, bench.query, None, None, bench.cache, metadata, Outputs(bench.output))
                for name, metadata in made.items()
            }
            tensors, terms = (bench.query, *impl._views(bench.cache)), (True, impl._layer)
            calls["prefix"] = partial(impl._run, *tensors, None, *terms, made["cascade"].prefix, {})
            calls["rest"] = partial(impl._run, *tensors, None, *terms, made["cascade"].arguments, {})
            (first, first_lse), (second, second_lse) = calls["prefix"](), calls["rest"]()
            calls["merge"] = partial(ops.merge_attn_states, bench.output, first, first_lse.T, second, second_lse.T)
            found = gpu_times(calls)
            saved = (batch - 1) * prefix * 2 * LLAMA.num_kv_heads * LLAMA.head_size * 2 / 2**20
            print(
                f"  B{batch:<3d} prefix {prefix:5d} saves {saved:6.0f} MiB: "
                + "  ".join(f"{name} {found[name]:.1f}" for name in calls)
                + f"  x{found['plain'] / found['cascade']:.2f}"
            )


def mla(environment: Environment | None) -> None:
    print("\nMLA decode: GPU time by graph replay in us, host time in us")
    for name, heads, batch, seq_len in MLA_CASES:
        config = AttentionConfig(num_heads=heads, **DEEPSEEK)
        bench = Bench(config, environment, [1] * batch, [seq_len] * batch)
        bench.cache.mul_(0.3)
        weight = torch.randn(heads * 256, 512, device="cuda", dtype=BF16) * 512**-0.5
        layer: Any = MLAAttention(bench.group, weight)
        impl = layer.impls["decode"]
        call = bench.group.backends["decode"].builder.build(0, bench.common)
        plain = bench.group.backends["decode"].builder.build(0, bench.common, True)
        query, output = bench.query * 0.3, torch.empty(batch, heads, 512, device="cuda", dtype=BF16)
        latent_query, rope_query = query.split_with_sizes([512, 64], -1)
        latent, rope = bench.cache.unsqueeze(2).split_with_sizes([512, 64], -1)
        adapter = impl._decode

        tensors, own = (rope_query, rope, latent), {adapter.latent_query: latent_query, "return_softmax_lse": False}
        if adapter.build.out.value:
            own["out"] = output
        raw, scheduled = (
            partial(adapter.function, *tensors, **impl._decode_layer, **made.arguments, **own) for made in (plain, call)
        )
        ours = partial(impl.forward_mqa, query, bench.cache, call, Outputs(output))
        impl.forward_mqa(query, bench.cache, call, Outputs(output))
        row = bench.cache[bench.table.device_table[0].long()].flatten(0, 1)[:seq_len].double()
        wanted = (query[0].double() @ row.T * layer.terms.scale).softmax(-1) @ row[:, :512]
        error = float((output[0].double() - wanted).norm() / wanted.norm())
        found = gpu_times(
            {
                "raw": raw,
                "again": partial(raw),
                "ours": ours,
            }
        )  # fmt: skip
        with torch.inference_mode():
            host = host_times(
                {
                    "raw": scheduled,
                    "ours": ours,
                },
                repeat=5,
            )  # fmt: skip
        print(
            f"  {name:20s} error {error:.1e}  raw {found['raw']:.1f}  again x{found['again'] / found['raw']:.3f}  "
            f"ours x{found['ours'] / found['raw']:.3f}  host raw {host['raw']:.1f} ours {host['ours']:.1f}"
        )


PARTS = {"check": check, "overhead": overhead, "build": build, "graph": graph, "cascade": cascade, "mla": mla}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in order (default: %(default)s)")
    parser.add_argument("--with", dest="pins", action="append", default=[], metavar="NAME==VERSION")
    parser.add_argument("--merge", metavar="MODULE:FUNCTION", help="an implementation of merge_attn_states to use")
    arguments = parser.parse_args()
    if arguments.merge:
        module, _, function = arguments.merge.partition(":")
        own = getattr(importlib.import_module(module), function)
        ops._chosen["merge_attn_states", torch.device("cuda", 0)] = own, arguments.merge
    environment = Environment(pins=parse_pins(arguments.pins)) if arguments.pins else None
    plan = select(LLAMA, backend="FLASH_ATTN", environment=environment).plans["decode"]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, plan.path, plan.provider)
    with torch.no_grad():
        for part in arguments.parts.split(","):
            PARTS[part](environment)


if __name__ == "__main__":
    main()
