"""What is true of FlashInfer's kernels without running them. Imports no torch."""
