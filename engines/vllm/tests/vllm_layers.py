"""What tests of the choice share: layers, their selections for serving, and a user's rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_select import AttentionConfig, __version__, select
from attn_select.engines.own_choice import SERVING
from attn_select.testing.toolkit import MLA_FIELDS
from attn_select_vllm.names import EngineBackend

HEAD = f"attn-select {__version__} "
MLA_LAYERS = AttentionConfig(**MLA_FIELDS)


def vllms(name: str) -> EngineBackend:
    return EngineBackend(name, own=False)


def serving(config: AttentionConfig, gpu: str, **options: Any) -> Any:
    return select(config, gpu, **{"workload": SERVING, **options})


def mine(text: str, folder: Path) -> Path:
    """A user's file of one rule."""
    (folder / "mine.toml").write_text(f'version = 1\n[[rules]]\nname = "mine"\n{text}\n')
    return folder / "mine.toml"
