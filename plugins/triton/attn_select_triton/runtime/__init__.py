"""The backends at run time: metadata builders, implementations of layers, and the shared operations. Imports torch."""
