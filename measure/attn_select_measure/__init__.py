"""Measures attention layers, and makes rules, tables, charts and reports of what was measured."""
