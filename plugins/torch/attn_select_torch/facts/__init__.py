"""What is true without running: the facts and plans of the backends. No torch."""
