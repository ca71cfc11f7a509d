"""Runs the plan on tensors: builder, impl, workspace and the adapters to the kernel libraries."""
