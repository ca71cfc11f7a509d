"""What runs FlashInfer's kernels: builders, layers, wrappers. Imports torch; FlashInfer is imported by ``load``."""
