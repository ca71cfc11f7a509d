"""What is true of the backends before they run: capabilities with their sources, and plans. No torch, no Triton."""
