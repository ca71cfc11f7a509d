"""Tensors start here: caches, metadata, the protocols that backends implement, and the layers that engines call."""
