"""Which Triton kernels drawn steps of vLLM still need behind what is compiled ahead, on a GPU that is not here.

``python compiled_ahead.py CAPABILITY COUNT SEED`` draws layers and the layouts of vLLM's caches. Prints a line of JSON
each: the layer, how many kernels were compiled ahead, how many of them the steps launched, and what they lacked.
Nothing is compiled: two launches are of one kernel where Triton would compile them together.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.append(str(Path(__file__).parents[3] / "plugins" / "triton" / "tests" / "aot"))

import torch
import vllm_emulated
from fake_gpu import kernels, noting, pretend
from vllm_emulated import LLAMA, CommonAttentionMetadata, engine_config

GPUS = {80: "a100", 90: "h200", 100: "b200", 120: "rtx5090"}
DEVICE = torch.device("cuda", 0)
REQUESTS, TOKENS, LENGTH = 256, 8192, 32768
LAYOUTS = ("LBHNC", "LBNHC", "BLHNC")


def drawn_layer(draw: random.Random, capability: int) -> dict[str, Any]:
    """Return the arguments of an impl of vLLM's, and a block size."""
    kv_heads, sinks = draw.choice([1, 2, 4, 8]), draw.random() < 0.25
    heads = kv_heads * draw.choice([1, 2, 4, 5, 8])
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": draw.choice([64, 64, 80, 96, 128, 128, 256]),
        "sliding_window": draw.choice([None, None, 128, 1024]),
        "logits_soft_cap": draw.choice([None, None, 30.0]),
        "sinks": sinks,
        "alibi": not sinks and draw.random() < 0.2,
        "kv_cache_dtype": draw.choice(["auto", "auto", "fp8_e5m2" if capability == 80 else "fp8"]),
        "block_size": draw.choice([16, 32, 64, 128]),
        "drafts": draw.choice([0, 0, 3, 7]),
    }


def drawn_steps(draw: random.Random, drafts: int) -> list[tuple[list[int], list[int], bool]]:
    """Return query lengths, lengths, and whether a graph is captured with them. Some decodes have fewer drafts."""

    def length(least: int) -> int:
        return draw.randint(least, max(least, int(2 ** draw.uniform(0, 15))))

    steps: list[tuple[list[int], list[int], bool]] = []
    for size in (1, 2, 8, 20, 100, REQUESTS):
        steps.append(([1 + drafts] * size, [LENGTH] * size, True))
        for _ in range(3):
            queries = [1 + draw.randint(0, drafts) for _ in range(size)]
            steps.append((queries, [length(query) for query in queries], False))
    for _ in range(24):
        queries = [draw.choice([1, 5, 70, 700]) for _ in range(draw.randint(1, 8))]
        decodes = [1 + drafts] * draw.choice([0, 0, 3, 60])
        queries = decodes + [query + 1 + drafts for query in queries]
        steps.append((queries, [length(query + 1) for query in queries], False))
    for _ in range(32):  # small ones
        queries = [drafts + draw.choice([2, 6, 20, 40, 60]) for _ in range(draw.randint(1, 3))]
        queries = [1 + drafts] * draw.choice([0, 1, 3, 8, 20, 60]) + queries
        steps.append((queries, [query + draw.randint(0, draw.choice([60, 900])) for query in queries], False))
    return steps


def step_of(queries: list[int], lens: list[int], block_size: int) -> Any:
    """Return a step as vLLM describes it; every block is block 0, and nothing is written."""
    bounds = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    host = torch.tensor(lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=bounds.to(DEVICE),
        query_start_loc_cpu=bounds,
        seq_lens=host.to(DEVICE),
        num_reqs=len(lens),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(lens),
        block_table_tensor=torch.zeros(len(lens), -(-LENGTH // block_size), dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.full((sum(queries),), -1, dtype=torch.int64, device=DEVICE),
        seq_lens_cpu_upper_bound=host,
    )


def cache_of(layout: str, impl: Any, block_size: int) -> Any:
    """Return a layer's cache as vLLM hands it out."""
    logical = {"L": 32, "B": 8, "H": impl.num_kv_heads, "N": block_size, "C": 2 * impl.head_size}
    memory = torch.zeros([logical[axis] for axis in layout], dtype=impl.storage_dtype, device=DEVICE)
    axes = [axis for axis in layout if axis != "L"]
    return memory.select(layout.index("L"), 1).permute([axes.index(axis) for axis in "BHNC"])


def run(layer: Any, cache: Any, builder: Any, step: Any, captured: bool) -> None:
    """Build and run a step."""
    impl, tokens = layer.impl, step.num_actual_tokens
    metadata = builder.build_for_cudagraph_capture(step) if captured else builder.build(0, step)
    heads = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)
    rows = torch.zeros(tokens, sum(heads) * impl.head_size, dtype=torch.bfloat16, device=DEVICE)
    parts = rows.split([each * impl.head_size for each in heads], dim=-1)
    query, key, value = (part.view(tokens, -1, impl.head_size) for part in parts)
    impl.do_kv_cache_update(layer, key, value, cache, step.slot_mapping)
    impl.forward(layer, query, key, value, cache, metadata, torch.empty_like(query))


def main(capability: int, count: int, seed: int) -> None:
    """Draw layers, print what each lacked."""
    config, draw = engine_config(LLAMA), random.Random(seed)
    config.model_config.max_model_len = LENGTH
    config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = REQUESTS, TOKENS
    config.compilation_config.cudagraph_mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    with vllm_emulated.emulated_vllm(config, "0.32.0") as engine:
        engine.platform.device_name = "cuda"
        pretend(capability)
        from interpreted import selected_for

        from attn_select.runtime import loaded_backend
        from attn_select_vllm.kernels import attention, binding

        binding.select = functools.partial(selected_for, GPUS[capability], binding.select)
        loaded_backend.device_of = lambda selection, device: DEVICE
        torch.set_default_dtype(torch.bfloat16)
        scales = {f"_{n}_scale": torch.ones((), dtype=torch.float32, device=DEVICE) for n in "qkv"}
        scales |= {f"_{n}_scale_float": 1.0 for n in "qkv"}
        for _ in range(count):
            asked = drawn_layer(draw, capability)
            speculation = SimpleNamespace(num_speculative_tokens=asked["drafts"], draft_model_config=None)
            config.speculative_config = speculation if asked["drafts"] else None
            given = {name: value for name, value in asked.items() if name not in ("block_size", "alibi", "drafts")}
            ones = torch.ones(asked["num_heads"], device=DEVICE)
            given |= {"sinks": ones if asked["sinks"] else None, "scale": 1.0}
            given["alibi_slopes"] = [1.0] * asked["num_heads"] if asked["alibi"] else None
            impl = attention.TritonAttnBackend.get_impl_cls()(**given)
            layer = SimpleNamespace(impl=impl, **scales)
            config.compilation_config.static_forward_context = {"layer": layer}
            made, spec = attention.TritonAttnBackend.get_builder_cls(), SimpleNamespace(block_size=asked["block_size"])
            with noting() as ahead:
                builder = made(spec, ["layer"], config, DEVICE)
            cache = cache_of(draw.choice(LAYOUTS), impl, asked["block_size"])
            with noting() as later:
                for queries, lens, captured in drawn_steps(draw, asked["drafts"]):
                    run(layer, cache, builder, step_of(queries, lens, asked["block_size"]), captured)
            lacked = kernels(later) - kernels(ahead)
            used = len(kernels(later) & kernels(ahead))
            print(json.dumps([asked, len(kernels(ahead)), used, sorted(lacked)]), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
