"""Measure FLASHINFER on one GPU: checked against the oracle first, then timed, interleaved, medians.

Run ``python research/bench_flashinfer.py [--parts check,overhead,...]``.

Parts: ``check`` (against float64), ``overhead`` (raw call, raw call again as a control, our layer: GPU time by graph
replay, host time), ``build`` (host time of FlashInfer's own ``plan``, of it again, of our ``build``), ``cascade``
(against the plain path and FlashInfer's own cascade wrapper).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import flashinfer
import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from random_step import RandomStep

from attn_select import AttentionConfig, select
from attn_select.runtime import Attention, Outputs, ops
from attn_select.runtime.timer import Call, gpu_times, host_times

BF16 = torch.bfloat16
HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
CONFIG = AttentionConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, block_size=PAGE)
DECODES = (("decode B64 S4096", 64, 4096), ("decode B8 S16384", 8, 16384), ("decode B256 S1024", 256, 1024))
MIB = 1 << 20
HOST_CALLS = 20
"""Calls in a row by which the host is timed."""


@cache
def rules(use_trtllm: str) -> Path:
    """Return a rules file that sets the option."""
    path = Path(tempfile.mkdtemp()) / "rules.toml"
    path.write_text(f"version = 1\n[backends.FLASHINFER]\nuse_trtllm = {use_trtllm}\n")
    return path


class Bench(RandomStep):
    """One batch of FLASHINFER's layers and one layer; ``use_trtllm`` as TOML has it."""

    def __init__(
        self, query_lens: Sequence[int], seq_lens: Sequence[int], shared: int = 0, use_trtllm: str = "false"
    ) -> None:
        super().__init__(select(CONFIG, backend="FLASHINFER", rules=rules(use_trtllm)), query_lens, seq_lens, shared)
        self.builder: Any = self.group.distinct[0].builder
        self.layer = Attention(self.group, caller_writes=True)
        self.impl: Any = self.layer.impls["decode"]

    def described(self, prefix: int = 0) -> str:
        """Return the error of a step with this common prefix, and what ran."""
        error = self.error(self.layer, self.group.build(self.common, prefix))
        return f"{error:.1e} {dict(self.builder.ran)}"

    def forward(self, metadata: Any) -> Call:
        """Return a call of the layer's kernel part."""
        given = (self.query, None, None, self.cache, metadata, Outputs(self.output))
        return partial(self.impl.forward, *given)

    def lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return indptr and last page lengths on the host, indices on the device, as an engine would hand them over."""
        pages = [-(-length // PAGE) for length in self.seq_lens]
        indptr = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        last = torch.tensor([(length - 1) % PAGE + 1 for length in self.seq_lens], dtype=torch.int32)
        rows = self.common.block_table_tensor
        assert rows is not None
        return indptr, torch.cat([rows[row, :count] for row, count in enumerate(pages)]), last

    def raw_decode(self) -> tuple[Any, Call, Call]:
        """Return FlashInfer's decode wrapper, its plan and its run."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(394 * MIB, dtype=torch.uint8, device="cuda"), "NHD", use_tensor_cores=True, backend="fa2"
        )
        plan = partial(
            wrapper.plan, *self.lists(), HEADS, KV_HEADS, SIZE, PAGE, q_data_type=BF16, kv_data_type=BF16,
            seq_lens=self.common.seq_lens_cpu,
        )  # fmt: skip
        plan()
        return wrapper, plan, partial(wrapper.run, self.query, self.cache, out=self.output)

    def raw_prefill(self) -> tuple[Any, Call, Call]:
        """Return FlashInfer's prefill wrapper on fa3, its plan and its run."""
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(394 * MIB, dtype=torch.uint8, device="cuda"), "NHD", backend="fa3"
        )
        plan = partial(
            wrapper.plan, self.common.query_start_loc_cpu, *self.lists(), HEADS, KV_HEADS, SIZE, PAGE, causal=True,
            q_data_type=BF16, kv_data_type=BF16, seq_lens=self.common.seq_lens_cpu,
        )  # fmt: skip
        plan()
        return wrapper, plan, partial(wrapper.run, self.query, self.cache, out=self.output)

    def raw_xqa(self) -> Call:
        """Return FlashInfer's TRT-LLM entry on XQA."""
        assert self.common.block_table_tensor is not None
        return partial(
            trtllm_batch_decode_with_kv_cache, self.query, self.cache,
            torch.zeros(394 * MIB, dtype=torch.uint8, device="cuda"), self.common.block_table_tensor.contiguous(),
            self.common.seq_lens, self.common.max_seq_len, bmm1_scale=SIZE**-0.5, out=self.output, kv_layout="NHD",
            backend="xqa",
        )  # fmt: skip


def check() -> None:
    print("\ncheck: worst relative error of rows against float64")
    for use_trtllm in ("false", '"auto"'):
        for name, batch, seq_len in DECODES:
            bench = Bench([1] * batch, [seq_len] * batch, use_trtllm=use_trtllm)
            print(f"  {name:18s} {bench.described()}")
    bench = Bench([1, 1, 700, 33, 256], [5000, 17, 700, 1033, 3000])
    print(f"  {'mixed':18s} {bench.described()}")
    bench = Bench([1] * 16, [4096 + 50 * i for i in range(1, 17)], 4096)
    print(f"  {'cascade B16 P4096':18s} {bench.described(4096)}")


def overhead() -> None:
    print("\noverhead: GPU time by graph replay in us (raw, raw again, ours), host time in us")
    cases: list[tuple[str, Bench, Call, Call]] = []
    for name, batch, seq_len in DECODES:
        native = Bench([1] * batch, [seq_len] * batch)
        cases.append((f"{name} native", native, native.raw_decode()[2], native.raw_decode()[2]))
        xqa = Bench([1] * batch, [seq_len] * batch, use_trtllm='"auto"')
        cases.append((f"{name} xqa", xqa, xqa.raw_xqa(), xqa.raw_xqa()))
    prefill = Bench([4096] * 4, [4096] * 4)
    cases.append(("prefill B4 S4096 fa3", prefill, prefill.raw_prefill()[2], prefill.raw_prefill()[2]))
    for name, bench, raw, again in cases:
        ours = bench.forward(bench.group.build(bench.common).parts[0].metadata)
        found = gpu_times({"raw": raw, "again": again, "ours": ours})
        print(
            f"  {name:25s} raw {found['raw']:8.1f}  again x{found['again'] / found['raw']:.3f}  "
            f"ours x{found['ours'] / found['raw']:.3f}"
        )
    for name, use_trtllm in (("native", "false"), ("xqa", '"auto"')):
        bench = Bench([1] * 8, [256] * 8, use_trtllm=use_trtllm)
        raw, again = (bench.raw_decode()[2] if name == "native" else bench.raw_xqa() for _ in range(2))
        metadata = bench.group.build(bench.common)
        layer = partial(bench.layer.forward, bench.query, None, None, bench.cache, metadata, bench.output)
        calls = {"raw": raw, "impl.forward": bench.forward(metadata.parts[0].metadata), "layer.forward": layer}
        with torch.inference_mode():
            host = host_times({**calls, "again": again}, HOST_CALLS)
        print(f"  host, {name} decode B8: " + "  ".join(f"{key} {value:.1f}" for key, value in host.items()))


def build() -> None:
    print("\nbuild: host time in us of FlashInfer's plan, of it again, of our build (lists, indices and plan)")
    for batch in (8, 64, 256):
        bench = Bench([1] * batch, [1024] * batch)
        plans = {"plan": bench.raw_decode()[1], "again": bench.raw_decode()[1]}
        host = host_times({**plans, "build": partial(bench.builder.build, 0, bench.common)}, HOST_CALLS)
        print(f"  native decode B{batch}: " + "  ".join(f"{key} {value:.1f}" for key, value in host.items()))
        bench = Bench([1] * batch, [1024] * batch, use_trtllm='"auto"')
        host = host_times({"build": partial(bench.builder.build, 0, bench.common)}, HOST_CALLS)
        print(f"  XQA decode B{batch}: build {host['build']:.1f}")
    bench = Bench([512] * 8, [1024] * 8)
    plans = {"plan": bench.raw_prefill()[1], "again": bench.raw_prefill()[1]}
    host = host_times({**plans, "build": partial(bench.builder.build, 0, bench.common)}, HOST_CALLS)
    print("  fa3 prefill B8: " + "  ".join(f"{key} {value:.1f}" for key, value in host.items()))


def raw_cascade(bench: Bench, prefix: int) -> Call:
    """Return the run of FlashInfer's own cascade wrapper."""
    scratch = torch.empty(394 * MIB, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, scratch, "NHD")
    indptr, indices, last = bench.lists()
    shared, requests = prefix // PAGE, len(bench.seq_lens)
    first = indptr[:-1].tolist()
    own = torch.cat([indices[start + shared : end] for start, end in zip(first, indptr[1:].tolist(), strict=True)])
    ints = partial(torch.tensor, dtype=torch.int32)
    wrapper.plan(
        [ints([0, requests]), bench.common.query_start_loc_cpu],
        [ints([0, shared]), indptr - shared * torch.arange(requests + 1, dtype=torch.int32)],
        [indices[:shared], own],
        [ints([PAGE]), last],
        HEADS, KV_HEADS, SIZE, PAGE, causal=True, q_data_type=BF16, kv_data_type=BF16,
    )  # fmt: skip
    return partial(wrapper.run, bench.query, bench.cache)


def cascade() -> None:
    print("\ncascade: GPU time in us of the plain path, of ours and of FlashInfer's wrapper; 128 tokens of own context")
    print(f"  flatten_block_table by {ops.implementation('flatten_block_table', torch.device('cuda', 0))[1]}")
    for batch in (8, 32, 128):
        for prefix in (256, 1024, 4096, 16384):
            bench = Bench([1] * batch, [prefix + 128] * batch, prefix)
            other = Bench([1] * batch, [prefix + 128] * batch, prefix)  # its wrappers keep the plain plan
            calls = {
                "plain": other.forward(other.builder.build(0, other.common)),
                "cascade": bench.forward(bench.builder.build(prefix, bench.common)),
                "theirs": raw_cascade(bench, prefix),
            }
            found = gpu_times(calls, repeat=5, rounds=9)
            saved = (batch - 1) * prefix * 2 * KV_HEADS * SIZE * 2 / MIB
            print(
                f"  B{batch:<3d} prefix {prefix:5d} saves {saved:6.0f} MiB: "
                + "  ".join(f"{name} {found[name]:.1f}" for name in calls)
                + f"  x{found['plain'] / found['cascade']:.2f}"
            )


PARTS = {"check": check, "overhead": overhead, "build": build, "cascade": cascade}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="which, in order (default: %(default)s)")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "flashinfer", flashinfer.__version__)
    with torch.no_grad():
        for part in arguments.parts.split(","):
            PARTS[part]()


if __name__ == "__main__":
    main()
