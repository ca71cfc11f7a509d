"""One gated delta net layer of Qwen3-Next serves two requests: a prompt in chunks, decodes with drafts, and a fork.

python examples/state_layer.py
"""

from __future__ import annotations

import torch

from attn_select import StateConfig, select
from attn_select.runtime import prepare_batch
from attn_select.runtime.states import Gates, LinearAttention, StateGroup, StatePool

DRAFTS = 2


def main() -> None:
    """Run three steps and a fork, and say what the pool holds."""
    config = StateConfig(
        recurrence="gated_delta_net",
        num_heads=16,
        num_v_heads=32,
        head_size=128,
        conv_kernel_size=4,
        dtype="float32",
        num_speculative_tokens=DRAFTS,
    )
    group = StateGroup(select(config, "cpu"))
    pool = StatePool(num_slots=12, num_speculative_tokens=DRAFTS)
    layer = LinearAttention(group, conv_weight=torch.randn(config.conv_dim, config.conv_kernel_size) / 2)
    cache = group.allocate(pool.num_slots)

    seen = {"one": 0, "two": 0}  # tokens that each request's state has seen

    def step(num_tokens: dict[str, int]) -> torch.Tensor:
        """Run the new tokens of each request, decodes first: the projections of a model stand for the inputs."""
        total = sum(num_tokens.values())
        seen.update({request: seen[request] + tokens for request, tokens in num_tokens.items()})
        common = prepare_batch(list(num_tokens.values()), [seen[request] for request in num_tokens])
        channels = torch.randn(total, config.conv_dim)
        gates = Gates(-torch.rand(total, config.num_v_heads), torch.rand(total, config.num_v_heads))
        metadata = group.build(common, pool.step(num_tokens))
        output: torch.Tensor = layer(channels, gates, cache, metadata)
        return output

    pool.add("one")
    pool.add("two")
    step({"one": 200})
    step({"one": 100, "two": 40})  # the rest of a prompt beside another one
    output = step({"one": 1 + DRAFTS, "two": 1 + DRAFTS})
    print(f"a decode with drafts: output {tuple(output.shape)}, {pool.num_free_slots} of {pool.num_slots} slots free")
    pool.accept("one", 1)  # its drafts are rejected: the next step starts behind its first token
    pool.accept("two", 3)
    seen["one"] -= DRAFTS
    seen["three"] = seen["two"]
    pool.fork("two", "three")  # shares the state until one of the two has written
    step({"one": 1 + DRAFTS, "two": 1, "three": 1})
    print(f"after a fork: {pool.num_free_slots} of {pool.num_slots} slots free")
    pool.free("two")
    print(f"after a request has ended: {pool.num_free_slots} of {pool.num_slots} slots free")


if __name__ == "__main__":
    main()
