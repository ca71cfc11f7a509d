"""attn-select in transformers: ``attn_implementation="attn_select"`` for ``generate()`` and continuous batching.

Importing this package is enough; it calls ``register``.
"""

from __future__ import annotations

from attn_select_transformers.dense import MaskError
from attn_select_transformers.explain import LayerChoice, ModelExplanation, explain_model
from attn_select_transformers.refusal import ModelNotServedError
from attn_select_transformers.registration import RELEASES, register

__version__ = "0.1.0"
__all__ = [
    "RELEASES",
    "LayerChoice",
    "MaskError",
    "ModelExplanation",
    "ModelNotServedError",
    "explain_model",
    "register",
]

register()
