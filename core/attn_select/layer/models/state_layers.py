"""The layers of a model that keep a state instead of keys and values: which recurrence, and its sizes.

Fields are named as in transformers' config classes (5.23.0), each with the module that reads it.
"""

from __future__ import annotations

from collections.abc import Callable

from attn_select.errors import ModelError
from attn_select.layer.models.fields import Fields
from attn_select.layer.models.layer_kind import StateLayer


def state_layer(fields: Fields) -> StateLayer | str:
    """Return what the state layers of a model ask for, or why no ``StateConfig`` describes them."""
    if fields.family.no_recurrence is not None:
        return fields.family.no_recurrence
    read = _READERS.get(fields.family.state or "")
    return "a recurrence that is not known" if read is None else read(fields)


def _needed(fields: Fields, name: str) -> int:
    if (value := fields.integer(name)) is None:
        raise ModelError(f"{fields.where}: {name} is missing, which its state layers need")
    return value


def _state_dtype(fields: Fields) -> str:
    """Return the dtype of states: Qwen3.5 and Nemotron-H name it; float32 is what transformers keeps them in.

    ``auto`` names none.
    """
    named = [fields.get(name) for name in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")]
    return next((each for each in named if isinstance(each, str) and each != "auto"), "float32")


def _head_size(fields: Fields, heads: int, name: str) -> int:
    """Return the width of a head of recurrences whose keys and values are alike; ``name`` is the field that says it."""
    if (size := fields.head_size(heads)) is None:
        raise ModelError(f"{fields.where}: {name} is missing, which its state layers need")
    return size


def _gated_delta_net(fields: Fields) -> StateLayer:
    """Qwen3-Next, Qwen3.5, OLMo Hybrid (``Qwen3NextGatedDeltaNet``, ``OlmoHybridConfig.__post_init__``)."""
    heads = fields.heads("linear_num_key_heads") or _needed(fields, "num_attention_heads")
    v_heads = fields.heads("linear_num_value_heads") or _needed(fields, "num_attention_heads")
    size = fields.size("linear_key_head_dim") or int(0.75 * _needed(fields, "hidden_size") / heads)
    return StateLayer(
        recurrence="gated_delta_net",
        num_heads=heads,
        num_v_heads=v_heads,
        head_size=size,
        v_head_size=fields.size("linear_value_head_dim") or 2 * size,
        conv_kernel_size=_needed(fields, "linear_conv_kernel_dim"),
        state_dtype=_state_dtype(fields),
    )


def _kda(fields: Fields) -> StateLayer:
    """Kimi Linear, GLM-5.3-Flash, Ling 2.5 (``KimiLinearDeltaAttention``, ``Glm5NextTextConfig``)."""
    heads = fields.heads("linear_num_heads") or _needed(fields, "num_attention_heads")
    return StateLayer(
        recurrence="kda",
        num_heads=heads,
        head_size=fields.size("linear_head_dim") or _head_size(fields, heads, "linear_head_dim"),
        conv_kernel_size=_needed(fields, "linear_conv_kernel_dim"),
        state_dtype=_state_dtype(fields),
    )


def _mamba2(fields: Fields) -> StateLayer:
    """Nemotron-H, Bamba, Granite 4, Falcon-H1, Zamba2 (their ``Mamba2Mixer`` and ``__post_init__``)."""
    v_heads = _needed(fields, "mamba_num_heads")
    width = fields.integer("mamba_head_dim") if fields.get("mamba_head_dim") != "auto" else None
    if width is None:  # FalconH1Config: mamba_d_ssm is the width of all heads together
        every = fields.integer("mamba_d_ssm") or _needed(fields, "mamba_expand") * _needed(fields, "hidden_size")
        width = every // v_heads
    return StateLayer(
        recurrence="mamba2",
        num_heads=_needed(fields, "mamba_groups"),
        num_v_heads=v_heads,
        head_size=_needed(fields, "mamba_state_size"),
        v_head_size=width,
        conv_kernel_size=_needed(fields, "mamba_conv_kernel"),
        chunk_size=_needed(fields, "mamba_chunk_size"),
        state_dtype=_state_dtype(fields),
    )


def _lightning(fields: Fields) -> StateLayer:
    """MiniMax (``MiniMaxLightningAttention``): it has no convolution, and blocks for chunks."""
    heads = _needed(fields, "num_attention_heads")
    return StateLayer(
        recurrence="lightning",
        num_heads=heads,
        head_size=_head_size(fields, heads, "head_dim (or hidden_size)"),
        chunk_size=_needed(fields, "block_size"),
    )


_READERS: dict[str, Callable[[Fields], StateLayer]] = {
    "gated_delta_net": _gated_delta_net,
    "kda": _kda,
    "mamba2": _mamba2,
    "lightning": _lightning,
}
