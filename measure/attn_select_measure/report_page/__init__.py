"""The page that ``attn-select report`` writes: what is on it, its charts and its templates."""
