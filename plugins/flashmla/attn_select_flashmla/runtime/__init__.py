"""Runs the plans on tensors: builders, impls and the adapters to the kernel libraries."""
