"""What is true without running: the builds of FlashMLA, and the plans of both backends. No torch."""
