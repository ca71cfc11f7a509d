"""Attention in plain PyTorch for attn-select: dense layers, MLA and sparse MLA."""
