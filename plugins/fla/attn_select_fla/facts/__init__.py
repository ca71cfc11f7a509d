"""What is true of the backend without running it. Imports no torch."""
