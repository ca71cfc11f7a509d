"""How many ranks may share the contexts of requests (decode context parallelism)."""

from __future__ import annotations

from attn_select.layer.config import AttentionConfig


def wrong_ranks(config: AttentionConfig, tensor_parallel: int, ranks: int) -> tuple[str, str]:
    """Return why ``ranks`` of tensor parallelism cannot share contexts, and what would do; both empty where they can.

    Ranks that would hold the same keys share a context instead: the ranks with copies of one KV head, and all ranks of
    MLA. As in vLLM (vllm/config/parallel.py, vllm/config/model.py verify_with_parallel_config 0.33.0).
    """
    accepted = [size for size in range(1, tensor_parallel + 1) if not _against(config, tensor_parallel, size)]
    return _against(config, tensor_parallel, ranks), " or ".join(map(str, accepted))


def _against(config: AttentionConfig, tensor_parallel: int, ranks: int) -> str:
    if ranks == 1:
        return ""
    if tensor_parallel % ranks:
        return f"{ranks} does not divide the {tensor_parallel} ranks of tensor parallelism"
    if config.mla:
        return ""
    copies = tensor_parallel // config.num_kv_heads
    if ranks > copies:
        count = "one copy" if copies < 2 else f"{copies} copies"
        return f"{tensor_parallel} ranks hold {count} of each of the {config.num_kv_heads} KV heads"
    per_kv_head = config.num_heads // config.num_kv_heads
    return f"{ranks} does not divide the {per_kv_head} query heads per KV head" if per_kv_head % ranks else ""
