"""attn-select's kernels as backends of vLLM."""
