"""``python -m attn_select_transformers``: the command line of transformers, with ``attn_select`` registered."""

from __future__ import annotations

from transformers.cli.transformers import main

if __name__ == "__main__":
    main()
