"""attn-select in vLLM: the choice of every attention layer's backend, and backends on attn-select's kernels."""
