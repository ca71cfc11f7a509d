"""Runs the plans on tensors: builders and impls."""
