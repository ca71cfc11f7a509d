"""attn-select's backends as members of vLLM's ``AttentionBackendEnum``, so that they can be asked for by name."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def member(name: str, path: str) -> Any:
    """Return the backend of this name, made where it is not there yet."""
    # vLLM hands its configuration to other processes before they load any plugin, so a member is pickled as a call of
    # this function. Raises AttributeError or TypeError where the registry has another form.
    if name not in AttentionBackendEnum.__members__:
        if hasattr(AttentionBackendEnum, "register"):
            register_backend(name, path)
        else:
            _add(name, path)
        AttentionBackendEnum[name].__reduce_ex__ = lambda protocol: (member, (name, path))
    return AttentionBackendEnum[name]


def _add(name: str, path: str) -> None:
    """Do what ``AttentionBackendEnum.register`` does, for releases that override members and make none, until 0.26."""
    made: Any = object.__new__(AttentionBackendEnum)
    made._name_, made._value_ = name, path
    setattr(AttentionBackendEnum, name, made)
    AttentionBackendEnum._member_map_[name] = made
    AttentionBackendEnum._value2member_map_[path] = made
    AttentionBackendEnum._member_names_.append(name)
