"""The page that ``attn-select report`` writes: what is on it, and its templates."""
