"""Time the backends of sparse MLA against each other on this device, each checked against float64; prints a table.

Run ``python research/bench_sparse_mla.py [--with vllm==0.26.0] [--heads 8 16] [--backends NAME ...] [--rounds N]``;
``--with`` names the version of a library without package metadata. A layer is DeepSeek-V3.2's on as many ranks as leave
it these heads, with top-k 2048 of a 16-bit cache. Times are medians of interleaved rounds over one call in a CUDA
graph, L2 overwritten before each; prefills run without a graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_select.decide.selector import environment_for
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.detection import detect_device
from attn_select.machine.environment import Environment, parse_pins
from attn_select.rules.plugins import registered_spec
from attn_select.runtime import BlockTable, Capacity, MLAAttention, MLAAttentionGroup, Outputs, prepare_batch
from attn_select.runtime.timer import Call, captured, flushed_times
from attn_select.testing import mla_layer, relative_error, selection_of

NAMES = ("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE", "TRITON_MLA_SPARSE")
"""The first, which pads its heads to 64, is what the others are compared with."""
STEPS = ((1, 1, 8192), (16, 1, 8192), (64, 1, 8192), (128, 1, 4096), (1, 2048, 4096))
"""Requests, queries of each, keys of each."""
SCALE, TOP_K, PAGE = 192**-0.5, 2048, 64


class Step:
    """One step's tensors, the same for all backends."""

    def __init__(self, config: AttentionConfig, requests: int, query_len: int, seq_len: int, device: str) -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.config, self.query_len, self.device = config, query_len, device
        self.phase: Phase = "decode" if query_len == 1 else "prefill"
        blocks = torch.randperm(requests * -(-seq_len // PAGE), generator=draw, device=device).view(requests, -1)
        self.table = BlockTable(requests, blocks.shape[1], PAGE, device)
        for row in range(requests):
            self.table.set_row(row, blocks[row].tolist())
        self.common = prepare_batch([query_len] * requests, [seq_len] * requests, self.table)
        tokens = requests * query_len

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=device).bfloat16()

        self.cache = normal(blocks.numel(), PAGE, config.head_size)
        self.query = normal(tokens, config.num_heads, config.head_size)
        last = torch.arange(seq_len - query_len, seq_len, device=device).repeat(requests)[:, None]
        request = torch.arange(requests, device=device).repeat_interleave(query_len)[:, None]
        chosen = torch.rand(tokens, seq_len, generator=draw, device=device)
        chosen.masked_fill_(torch.arange(seq_len, device=device) > last, -1)
        values, positions = chosen.topk(min(TOP_K, seq_len), dim=1)
        slots = blocks[request, positions // PAGE] * PAGE + positions % PAGE
        self.indices = slots.masked_fill(values < 0, -1).int().contiguous()
        self.capacity = Capacity(requests, tokens, seq_len)

    def layer_call(self, name: str, environment: Environment) -> tuple[Call, Tensor]:
        """Return a backend's call on latents, and the tensor that it writes."""
        spec, device = registered_spec(name), detect_device().device
        selection = selection_of(spec, self.config, device, environment=environment)
        group = MLAAttentionGroup(selection, self.device, self.capacity, cuda_graphs=self.phase == "decode")
        weight = self.query.new_zeros(self.config.num_heads * 256, 512)
        layer = MLAAttention(group, weight, scale=SCALE)
        output = self.query.new_empty(*self.query.shape[:2], 512)
        build = group.build_for_cudagraph_capture if self.phase == "decode" else group.build
        part: Any = build(self.common).parts[0]
        impl = layer.impls[self.phase]
        arguments = (self.query, self.cache, part.metadata, Outputs(output), self.indices)
        return lambda: impl.forward_mqa(*arguments), output

    def error(self, output: Tensor) -> float:
        """Return the relative error of up to eight tokens."""
        wanted = []
        rows = torch.linspace(0, len(output) - 1, min(8, len(output))).long().tolist()
        for row in rows:
            slots = self.indices[row][self.indices[row] >= 0].long()
            keys = self.cache.view(-1, self.config.head_size)[slots].double()
            weights = (self.query[row].double() @ keys.T * SCALE).softmax(-1)
            wanted.append(weights @ keys[:, :512])
        return relative_error(output[rows].cpu(), torch.stack(wanted).cpu()).norm


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with", dest="pins", action="append", default=[], metavar="NAME==VERSION")
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--backends", nargs="+", default=NAMES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args(arguments)
    device = detect_device().device
    environment = environment_for(device)
    if given.pins:
        environment = Environment(pins=parse_pins(given.pins))
    names = given.backends
    print(f"{device.name}, torch {torch.__version__}: {', '.join(names)}; us, L2 cold; relative error")
    for heads in given.heads:
        config = mla_layer(num_heads=heads, sparse_top_k=TOP_K)
        for requests, query_len, seq_len in STEPS:
            step = Step(config, requests, query_len, seq_len, "cuda")
            calls: dict[str, Call] = {}
            errors: dict[str, float] = {}
            kept: list[Call] = []  # graphs hold the addresses of what these use, and not the tensors
            for name in names:
                call, output = step.layer_call(name, environment)
                kept.append(call)
                call()
                errors[name] = step.error(output)
                calls[name] = captured([call]).replay if step.phase == "decode" else call
            times = flushed_times(calls, given.rounds)
            shown = "  ".join(f"{times[name]:8.1f} {errors[name]:.1e}" for name in names)
            ratios = " and ".join(f"{times[names[0]] / times[name]:.2f}" for name in names[1:])
            step_name = f"H{heads:<3} {requests:>3} x q{query_len} s{seq_len:<6}"
            print(f"{step_name} {shown}  {ratios} times as fast", flush=True)


if __name__ == "__main__":
    main()
