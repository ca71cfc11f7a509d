"""What is true without running: the builds of CUTLASS MLA, and the plan. No torch."""
