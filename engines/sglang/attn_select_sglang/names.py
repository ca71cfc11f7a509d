"""Which of SGLang's attention backends stand for one of attn-select's: ``attn_select/engines/sglang.toml``, read.

Imports nothing of SGLang.
"""

from __future__ import annotations

from attn_select.engines.names import EngineName, engine_table

TABLE = engine_table("sglang")
_OF_FLASHINFER = ("trtllm_mha", "trtllm_mla", "flashinfer")


def lacks(name: EngineName, has_flashinfer: bool) -> str:
    """Say why this SGLang does not have a backend; empty where it does."""
    # FlashInfer brings the kernels of three of SGLang's backends.
    if name.name == "dsa":
        return "chosen by SGLang's own overrides of the model"
    return "with FlashInfer installed" if name.name in _OF_FLASHINFER and not has_flashinfer else ""


OWN_PREFIX = "attn_select_"
OWN_KERNELS = {
    OWN_PREFIX + name.lower(): name
    for name in ("TORCH_SDPA", "TRITON_ATTN", "TORCH_MLA", "TRITON_MLA", "FLASHINFER_MLA")
}
"""SGLang's name of a backend that runs attn-select's kernels -> attn-select's name of it."""
