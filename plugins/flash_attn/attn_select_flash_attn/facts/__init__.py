"""What is true without running: the builds of FlashAttention, and the plans of both backends. No torch."""
