"""Continuous batching of a random Llama on one GPU: attn-select against transformers' own routes, interleaved.

    python engines/transformers/bench/bench_continuous_batching.py [--layers 32] [--batch 64] [--repeats 3]
    python engines/transformers/bench/bench_continuous_batching.py --routes attn_select,flash_attention_3,sdpa

Each repeat runs every route once, over the same prompts of uneven length, and counts generated tokens per second from
the first request's arrival until the last one is done; transformers' warm-up comes before. Graphs and asynchronous
batching are as transformers decides for a route; "attn_select eager" has neither. Printed per route: the median and the
range; then the median of the per-repeat ratios of the first route to each other one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

import attn_select_transformers

PAGE = 256
"""Tokens per page, as transformers has it for flash attention."""


def model(options: argparse.Namespace) -> Any:
    """Return a random Llama, drawn so that attention is not uniform."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.prompt + options.new,
        tie_word_embeddings=False,
    )
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(options.device):
        made = transformers.LlamaForCausalLM(config).eval()
        torch.manual_seed(0)
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=0.02)
    torch.set_default_dtype(previous)
    return made


EAGER = " eager"
"""Behind a route's name: without CUDA graphs, and without asynchronous batching."""


def run(made: Any, route: str, prompts: list[list[int]], options: argparse.Namespace) -> float:
    """Return the tokens per second of one call."""
    made.set_attn_implementation(route.removesuffix(EAGER))
    blocks = sum(-(-(len(prompt) + options.new) // PAGE) for prompt in prompts) + 8
    known = ContinuousBatchingConfig.__dataclass_fields__
    given = {
        "page_size" if "page_size" in known else "block_size": PAGE,
        "num_blocks": blocks,
        "max_batch_tokens": options.max_batch_tokens,
        "auto_switch_to_flash": False,
        "max_requests_per_batch": len(prompts),
    }
    if route.endswith(EAGER):
        given |= {"use_cuda_graph": False, "use_async_batching": False}
    batching = ContinuousBatchingConfig(**{name: value for name, value in given.items() if name in known})
    generation = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    hints = WorkloadHints(max(map(len, prompts)), options.new, len(prompts))
    done = 0
    with made.continuous_batching_context_manager(
        generation, continuous_batching_config=batching, workload_hints=hints
    ) as manager:
        began = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=options.new)
        while done < len(prompts):
            if (found := manager.get_result(timeout=1)) is not None and found.is_finished():
                assert len(found.generated_tokens) == options.new
                done += 1
            elif found is None and not manager.is_running():
                raise SystemExit(f"{route}: generation ended with {done} of {len(prompts)} requests done")
        took = time.perf_counter() - began
    return options.new * len(prompts) / took


def main() -> None:
    """Run every route ``--repeats`` times in turn and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 32, "hidden": 4096, "heads": 32, "kv-heads": 8, "batch": 64, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--prompt", type=int, default=1024, help="the longest prompt; the shortest is an eighth")
    parser.add_argument("--new", type=int, default=128, help="tokens generated per request")
    parser.add_argument("--max-batch-tokens", type=int, default=4096, help="of one step")
    routes = f"attn_select,attn_select{EAGER},flash_attention_3"
    parser.add_argument("--routes", metavar="NAME,…", default=routes, help=f"the first by each other ({routes})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    made = model(options)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(max(1, options.prompt // 8), options.prompt + 1, (options.batch,), generator=generator)
    prompts = [torch.randint(1, 32000, (int(n),), generator=generator).tolist() for n in lengths]
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(
        f"{options.layers} layers, {options.batch} requests, {int(lengths.sum())} prompt tokens, {options.new} new each"
    )
    names = options.routes.split(",")
    speeds: dict[str, list[float]] = {route: [] for route in names}
    for repeat in range(-1, options.repeats):  # the first round compiles
        for route in names:
            speed = run(made, route, prompts, options)
            if repeat >= 0:
                speeds[route].append(speed)
    print(attn_select_transformers.explain_model(made).layers[0].selection.selected)
    for route, own in speeds.items():
        print(f"  {route:20} {statistics.median(own):9.0f} tokens/s ({min(own):.0f} to {max(own):.0f})")
    for route in names[1:]:
        ratios = [ours / theirs for ours, theirs in zip(speeds[names[0]], speeds[route], strict=True)]
        print(f"  {names[0]} by {route:20} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
