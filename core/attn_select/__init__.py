"""attn-select picks the attention kernel for an LLM layer, says why, and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_select.config import AttentionConfig as AttentionConfig
    from attn_select.device import Device as Device
    from attn_select.environment import Environment as Environment
    from attn_select.errors import AttnSelectError as AttnSelectError
    from attn_select.errors import ConfigError as ConfigError
    from attn_select.hookspecs import hookimpl as hookimpl
    from attn_select.models import configs_from_model as configs_from_model
    from attn_select.selection import NoBackendError as NoBackendError
    from attn_select.selection import Selection as Selection
    from attn_select.selector import clear_cache as clear_cache
    from attn_select.selector import select as select
    from attn_select.selector import select_model as select_model

__version__ = "0.1.0"

# Public name -> module. Loaded on first use, so that `import attn_select` stays cheap.
_EXPORTS = {
    "AttentionConfig": "config",
    "AttnSelectError": "errors",
    "ConfigError": "errors",
    "Device": "device",
    "Environment": "environment",
    "NoBackendError": "selection",
    "Selection": "selection",
    "clear_cache": "selector",
    "configs_from_model": "models",
    "hookimpl": "hookspecs",
    "select": "selector",
    "select_model": "selector",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        value = getattr(importlib.import_module(f"attn_select.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'attn_select' has no attribute {name!r}")
