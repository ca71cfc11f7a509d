"""Compile the convolution and the decode of state layers for one target without a GPU: ``compile_states.py 90``.

Prints one line of JSON per kernel (``fake_gpu.Compiled`` with its layer).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
from fake_gpu import compiling, pretend

from attn_select.layer.state import StateConfig
from attn_select.runtime.states import Gates, RawGates
from attn_select_triton.kernels.state_conv import causal_conv
from attn_select_triton.kernels.state_decode import decode_states

LAYERS = (
    # Qwen3-Next, Kimi K3, Nemotron-H 8B, MiniMax-Text-01, and the largest that is declared.
    StateConfig(recurrence="gated_delta_net", num_heads=16, num_v_heads=32, head_size=128, num_speculative_tokens=3),
    StateConfig(recurrence="kda", num_heads=96, head_size=128, conv_kernel_size=4),
    StateConfig(recurrence="mamba2", num_heads=8, num_v_heads=128, head_size=128, v_head_size=64),
    StateConfig(recurrence="lightning", num_heads=64, head_size=96, state_dtype="bfloat16", dtype="float16"),
    StateConfig(recurrence="kda", num_heads=2, head_size=256, dtype="float32", num_speculative_tokens=1),
)


def main() -> None:
    """Compile, and print what came out."""
    target = int(sys.argv[1])
    pretend(target)
    with compiling() as kernels:
        for config in LAYERS:
            dtype, stored = getattr(torch, config.dtype), getattr(torch, config.state_dtype)
            tokens, columns = 4, config.max_decode_query_len
            keys, values = (config.num_heads, config.head_size), (config.num_v_heads, config.v_head_size)
            heads = (tokens, config.num_v_heads)
            by_channel = config.rule.decay == "channel"
            width = (config.head_size,) if by_channel else ()
            if config.rule.writes:
                raw = RawGates(
                    A_log=torch.empty(heads[1]),
                    a=torch.empty(*heads, *width, dtype=dtype),
                    dt_bias=torch.empty(heads[1], *width),
                    b=None if config.recurrence == "mamba2" else torch.empty(heads, dtype=dtype),
                )
                gates = Gates(raw=raw)
            else:
                gates = Gates(torch.empty(*heads, *width))
            decode_states(
                torch.empty(tokens, *keys, dtype=dtype),
                torch.empty(tokens, *keys, dtype=dtype),
                torch.empty(tokens, *values, dtype=dtype),
                gates,
                torch.empty(8, config.num_v_heads, config.head_size, config.v_head_size, dtype=stored),
                torch.empty(tokens + 1, dtype=torch.int32),
                torch.empty(tokens, dtype=torch.int64),
                torch.empty(tokens, dtype=torch.int64),
                torch.empty(tokens, columns, dtype=torch.int64) if columns > 1 else None,
                torch.empty(tokens, *values, dtype=dtype),
                scale=0.5,
                delta_rule=config.rule.delta_rule,
                normalized=config.rule.normalized,
                v_first=config.recurrence == "gated_delta_net",
            )
            if config.conv_kernel_size:
                width, slots = config.conv_kernel_size, torch.empty(tokens, dtype=torch.int64)
                causal_conv(
                    torch.empty(tokens, config.width, dtype=dtype),
                    torch.empty(config.width, width, dtype=dtype),
                    None,
                    torch.empty(8, width - 1, config.width, dtype=dtype),
                    slots,
                    torch.empty(tokens, width, dtype=torch.int64),
                    slots,
                    torch.empty(tokens, width - 1, dtype=torch.int64),
                )
            for kernel in kernels:
                print(json.dumps({"layer": str(config), **asdict(kernel)}), flush=True)
            kernels.clear()


if __name__ == "__main__":
    main()
