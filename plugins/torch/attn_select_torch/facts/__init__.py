"""What is true without running: the facts and plans of the three backends. No torch."""
