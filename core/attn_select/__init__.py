"""attn-select picks the attention kernel for an LLM layer, says why, and runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_select.backends.hookspecs import hookimpl as hookimpl
    from attn_select.decide.selection import NoBackendError as NoBackendError
    from attn_select.decide.selection import Selection as Selection
    from attn_select.decide.selector import clear_cache as clear_cache
    from attn_select.decide.selector import select as select
    from attn_select.decide.selector import select_model as select_model
    from attn_select.errors import AttnSelectError as AttnSelectError
    from attn_select.errors import ConfigError as ConfigError
    from attn_select.layer.config import AttentionConfig as AttentionConfig
    from attn_select.layer.models import configs_from_model as configs_from_model
    from attn_select.layer.state import StateConfig as StateConfig
    from attn_select.machine.device import Device as Device
    from attn_select.machine.environment import Environment as Environment

__version__ = "0.1.0"

# Public name -> module. Loaded on first use, so that `import attn_select` stays cheap.
_EXPORTS = {
    "AttentionConfig": "layer.config",
    "AttnSelectError": "errors",
    "ConfigError": "errors",
    "Device": "machine.device",
    "Environment": "machine.environment",
    "NoBackendError": "decide.selection",
    "Selection": "decide.selection",
    "StateConfig": "layer.state",
    "clear_cache": "decide.selector",
    "configs_from_model": "layer.models",
    "hookimpl": "backends.hookspecs",
    "select": "decide.selector",
    "select_model": "decide.selector",
}

__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        value = getattr(importlib.import_module(f"attn_select.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'attn_select' has no attribute {name!r}")
