"""What is true without running: the builds of FlashAttention, and the plans of the backends. No torch."""
