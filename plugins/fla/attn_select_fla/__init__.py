"""The kernels of flash-linear-attention (fla-core) as a backend of attn-select."""
