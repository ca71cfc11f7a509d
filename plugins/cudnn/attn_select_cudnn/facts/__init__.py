"""What is true of the kernels without running them. No torch."""
