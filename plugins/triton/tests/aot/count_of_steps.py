"""Count what a layer's first steps compile on one target, without compiling: ``python count_of_steps.py 90``.

The steps are those of ``LayerGroup.warm_up``. Prints a line for each layer and kernel: the layer, the kernel, and how
many kinds of it, that is constants and specialisations.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from fake_gpu import kernels, noting, pretend

from attn_select import AttentionConfig
from attn_select.backends.spec import BackendSpec
from attn_select.runtime import Capacity, loaded_backend
from attn_select.runtime.compile_ahead import stand_in
from attn_select.runtime.warm_up import GroupSteps
from attn_select.testing import selection_of
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA

LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LAYERS: dict[str, tuple[BackendSpec, dict[str, Any]]] = {
    "llama-3-8b": (TRITON_ATTN, {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}),
    "deepseek-v3": (TRITON_MLA, {"num_heads": 16, **LATENT}),
}


def main(target: int) -> None:
    """Run the steps, print the counts."""
    pretend(target)
    loaded_backend.device_of = lambda selection, device: torch.device("cuda", 0)
    torch.set_default_dtype(torch.bfloat16)
    for name, (spec, fields) in LAYERS.items():
        selection = selection_of(spec, AttentionConfig(**fields), f"sm{target}")
        layer = stand_in(selection, "cuda", Capacity(256, 8192, 32768))
        steps = GroupSteps(layer.group)
        with noting() as found:
            for step in steps.steps:
                steps.run(step)
        for kernel, kinds in sorted(Counter(kernel for kernel, *_ in kernels(found)).items()):
            print(name, kernel, kinds)


if __name__ == "__main__":
    main(int(sys.argv[1]))
