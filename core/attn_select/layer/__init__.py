"""What an attention layer is."""
