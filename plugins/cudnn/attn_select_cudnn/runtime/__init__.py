"""What runs the kernels. Needs torch."""
