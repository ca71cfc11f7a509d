"""Measures attention layers, and makes rules, tables, charts and reports of the times."""
