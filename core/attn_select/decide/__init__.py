"""The decision: gate, order, choice, selection, text."""
