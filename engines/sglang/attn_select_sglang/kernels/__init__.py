"""attn-select's kernels as attention backends of SGLang."""
