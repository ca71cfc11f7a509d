"""What is known of engines, and what their adapters share."""

ENGINES = ("vllm", "sglang", "trtllm", "transformers")
"""The engines that a file of this folder describes, as ``--engine`` takes them."""
