"""Plain PyTorch for attn-select: attention, MLA, sparse MLA, and layers that keep a state."""
