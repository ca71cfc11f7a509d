"""Measures attention layers, and makes surveys, tables and reports of the times."""
