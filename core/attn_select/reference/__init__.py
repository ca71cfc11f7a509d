"""What is right: the float64 oracle, and the comparison with it."""
