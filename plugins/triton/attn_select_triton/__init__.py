"""Triton kernels for attn-select: attention, MLA, sparse MLA, classic paged attention, and states."""
