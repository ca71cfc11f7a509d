"""One attention layer of a model on this CPU, checked: ``python -m attn_select_torch.demo --model llama-3-8b``.

A plain run by hand, without a backend of attn-select: K and V enter a paged cache through a slot mapping, come back by
the block table, and torch's ``scaled_dot_product_attention`` serves a prefill and a step of decode. Random data, one
request, causal layers with or without a window; MLA runs decompressed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from typing import Any

from attn_select.config import AttentionConfig
from attn_select.device import CPU
from attn_select.errors import AttnSelectError, ConfigError

BLOCK_SIZE = 16
SLACK = {"float32": 16, "float16": 1, "bfloat16": 1}
"""Bound on the error in units of epsilon x the largest |V|. The output is an average of rows of V: rounding it, and the
weights, to 16 bits costs half a unit each. In float32 the sums over head_size products add to that."""


def reference(torch: Any, q: Any, k: Any, v: Any, window: int | None) -> Any:
    """Return softmax(q k^T / sqrt(d)) v, one query after the other in float64.

    q is (T, H, D), k (T, Hkv, D), v (T, Hkv, Dv), the result (T, H, Dv). A query sees itself and all before it; with a
    ``window``, of these only the last so many.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    rows = []
    for position, query in enumerate(q):
        seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
        scores = torch.einsum("hd,nhd->hn", query, k[seen]) / query.shape[-1] ** 0.5
        weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
        rows.append(torch.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdim=True), v[seen]))
    return torch.stack(rows)


def run_layer(config: AttentionConfig, *, num_tokens: int, seed: int) -> dict[str, Any]:
    """Run ``num_tokens`` of prefill and one of decode; return errors, times (cold, gather included) and sizes.

    Raises:
        ConfigError: torch is missing, ``num_tokens`` is below 1, or the layer is not a plain causal one.
    """
    odd = [name for name in ("alibi", "sinks", "mm_prefix", "non_causal", "sparse") if getattr(config, name)]
    odd += ["logits_soft_cap"] * (config.logits_soft_cap is not None)
    odd += [f"attn_type {config.attn_type}"] * (config.attn_type != "decoder")
    odd += [f"kv_cache_dtype {config.cache_dtype}"] * (config.cache_dtype != config.dtype)
    if odd or num_tokens < 1:
        raise ConfigError(f"this run serves plain causal layers, not {', '.join(odd) or f'{num_tokens} tokens'}")
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as missing:
        raise ConfigError(f"this run needs torch: {missing}", hint="pip install torch") from None
    dtype, heads, kv_heads = getattr(torch, config.dtype), config.num_heads, config.num_kv_heads
    k_size, v_size = config.head_size, config.value_head_size
    if config.qk_nope_head_dim and config.qk_rope_head_dim and config.v_head_dim:
        kv_heads, k_size, v_size = heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    total, generator = num_tokens + 1, torch.Generator().manual_seed(seed)
    shapes = ((heads, k_size), (kv_heads, k_size), (kv_heads, v_size))
    q, k, v = (torch.randn(total, *shape, generator=generator).to(dtype) for shape in shapes)
    # (2, num_blocks, block_size, num_kv_heads, head_size), poisoned; twice the blocks needed, handed out at random.
    needed = -(-total // BLOCK_SIZE)
    cache = torch.full((2, 2 * needed, BLOCK_SIZE, kv_heads, max(k_size, v_size)), float("nan"), dtype=dtype)
    block_table = torch.randperm(2 * needed, generator=generator)[:needed]
    positions, sdpa = torch.arange(total), torch.nn.functional.scaled_dot_product_attention
    slots = block_table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def step(start: int, end: int) -> tuple[Any, float]:
        began = time.perf_counter()
        by_slot = cache.flatten(1, 2)
        by_slot[0, slots[start:end], :, :k_size] = k[start:end]
        by_slot[1, slots[start:end], :, :v_size] = v[start:end]
        blocks = block_table[: -(-end // BLOCK_SIZE)]
        keys, values = (half[blocks].flatten(0, 1)[:end].transpose(0, 1)[None] for half in cache)
        distance = positions[start:end, None] - positions[None, :end]
        mask = (distance >= 0) & (distance < (config.sliding_window or total))
        queries, keys, values = q[start:end].transpose(0, 1)[None], keys[..., :k_size], values[..., :v_size]
        output = sdpa(queries, keys, values, attn_mask=mask, enable_gqa=heads != kv_heads)
        return output[0].transpose(0, 1), (time.perf_counter() - began) * 1e3

    with torch.inference_mode():
        (prefill, prefill_ms), (decode, decode_ms) = step(0, num_tokens), step(num_tokens, total)
        difference = torch.cat((prefill, decode)) - reference(torch, q, k, v, config.sliding_window)
    error = difference.abs().max().item()
    bound = SLACK[config.dtype] * torch.finfo(dtype).eps * v.abs().max().item()
    run = {"tokens": total, "prefill_ms": prefill_ms, "decode_ms": decode_ms, "cache_bytes": cache.nbytes}
    return {"heads": (heads, kv_heads), "max_abs_error": error, "error_bound": bound, "ok": error <= bound, **run}


def main(arguments: list[str] | None = None) -> int:
    """Run a model's first kind of layer; return 0, 1 where the error exceeds its bound, or 2 for bad input."""
    parser = argparse.ArgumentParser("python -m attn_select_torch.demo", description="Run one attention layer here.")
    parser.add_argument("--model", default="llama-3-8b", help="preset, config.json or a folder holding one")
    parser.add_argument("--tokens", type=int, default=512, help="length of the prompt")
    chosen = parser.parse_args(arguments)
    try:
        from attn_select.models import load  # only the command line needs models

        config = load(chosen.model).layer_kinds(tensor_parallel_size=1, device=CPU, overrides={}).kinds[0].config
        ran = run_layer(config, num_tokens=chosen.tokens, seed=0)
    except AttnSelectError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("{}: one layer in {}, {} query and {} KV heads".format(chosen.model, config.dtype, *ran["heads"]))
    print(f"paged cache  {ran['cache_bytes']:,} bytes, blocks of {BLOCK_SIZE} tokens in random order")
    print(f"prefill      {chosen.tokens} tokens in {ran['prefill_ms']:.1f} ms; decode: 1 in {ran['decode_ms']:.1f} ms")
    side = "within" if ran["ok"] else "ABOVE"
    print(f"error        {ran['max_abs_error']:.1e} against float64, {side} the bound {ran['error_bound']:.1e}")
    return 0 if ran["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
