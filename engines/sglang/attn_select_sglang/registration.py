"""attn-select's kernels among the attention backends that SGLang knows by name."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend

from attn_select_sglang.names import OWN_KERNELS


def register_kernels() -> None:
    """Let ``--attention-backend`` take the names of ``OWN_KERNELS``; nothing happens the second time."""
    for name, backend in OWN_KERNELS.items():
        if name not in ATTENTION_BACKEND_CHOICES:
            add_attention_backend_choices([name])
            register_attention_backend(name)(partial(made, backend))


def made(backend: str, model_runner: Any) -> Any:
    """Return attn-select's backend of this name for SGLang's model runner; errors as of ``OwnAttnBackend``."""
    # The model is loaded by now. A backend of the other kind says that it does not serve the layers.
    if model_runner.use_mla_backend:
        from attn_select_sglang.kernels.mla import OwnMLABackend

        return OwnMLABackend(model_runner, backend)
    from attn_select_sglang.kernels.mha import OwnMHABackend

    return OwnMHABackend(model_runner, backend)
