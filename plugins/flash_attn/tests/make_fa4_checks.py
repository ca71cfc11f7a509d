"""Ask the installed flash-attn-4 which calls it refuses on each architecture, and write its answers.

    python plugins/flash_attn/tests/make_fa4_checks.py > plugins/flash_attn/tests/fa4_checks.json

Needs ``flash-attn-4`` and CuTe DSL, and no GPU: tensors are fake and nothing is compiled, so what is asked is what its
Python checks by itself. FP8 and split keys are left out, since those checks ask for memory on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from typing import Any

ARCHITECTURES = {"9.0": "sm_90a", "10.0": "sm_100a", "10.3": "sm_103a", "11.0": "sm_110a", "12.0": "sm_120a"}
SIZES = [(d, d) for d in (16, 64, 72, 80, 96, 128, 160, 192, 224, 256, 264, 512)]
SIZES += [(192, 128), (128, 64), (64, 128), (128, 192), (256, 128), (64, 256)]
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_size_left": 32, "window_size_right": 0},
    "soft cap": {"softcap": 30.0},
    "sinks": {"learnable_sink": True},
}
NUM_HEADS, NUM_KV_HEADS, PAGE, REQUESTS = 8, 2, 16, 4


def cases() -> dict[str, tuple[int, int, bool, str | None]]:
    """Return head size, V head size, whether the cache is paged, and the feature, by name."""
    found: dict[str, tuple[int, int, bool, str | None]] = {}
    for (size, width), paged in itertools.product(SIZES, (True, False)):
        found[f"{size} and {width}, {'paged' if paged else 'packed'}"] = (size, width, paged, None)
    for feature in FEATURES:
        found[f"{feature}, paged"] = (128, 128, True, feature)
    return found


def refusals() -> dict[str, str | None]:
    """Return what the library says to each case on the architecture of this process; None: it takes it."""
    import cutlass.cute
    import flash_attn.cute.interface as interface
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    cutlass.cute.compile = lambda *_, **__: lambda *_, **__: None
    interface.to_cute_tensor = lambda tensor, **_: tensor
    interface.get_num_sms_for_selection = lambda *_: 132
    found: dict[str, str | None] = {}
    for name, (size, width, paged, feature) in cases().items():
        with FakeTensorMode():
            ints = {"dtype": torch.int32}
            query = torch.empty(64, NUM_HEADS, size, dtype=torch.bfloat16)
            rows = (50, PAGE) if paged else (64,)
            key, value = (torch.empty(*rows, NUM_KV_HEADS, each, dtype=torch.bfloat16) for each in (size, width))
            more = dict(FEATURES[feature]) if feature else {}
            if "learnable_sink" in more:
                more["learnable_sink"] = torch.empty(NUM_HEADS, dtype=torch.bfloat16)
            if paged:
                more |= {"page_table": torch.empty(REQUESTS, 8, **ints), "seqused_k": torch.empty(REQUESTS, **ints)}
            else:
                more["cu_seqlens_k"] = torch.empty(REQUESTS + 1, **ints)
            bounds = torch.empty(REQUESTS + 1, **ints)
            try:
                interface._flash_attn_fwd(
                    query, key, value, cu_seqlens_q=bounds, max_seqlen_q=16, max_seqlen_k=8 * PAGE, softmax_scale=1.0,
                    causal=True, num_splits=1, return_lse=True, **more,
                )  # fmt: skip
                found[name] = None
            except Exception as error:  # an assertion, or what comes of one that is lacking
                found[name] = f"{type(error).__name__}: {str(error)[:160]}"
    return found


def main() -> None:
    if sys.argv[1:] == ["--one"]:
        print(json.dumps(refusals()))
        return
    answers = {}
    for capability, target in ARCHITECTURES.items():
        own = {"FLASH_ATTENTION_ARCH": target.rstrip("a"), "CUTE_DSL_ARCH": target, "FLASH_ATTENTION_NUM_SMS": "132"}
        command = [sys.executable, "-W", "ignore", __file__, "--one"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | own)
        answers[capability] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"flash-attn-4": importlib.metadata.version("flash-attn-4"), "answers": answers}, indent=1))


if __name__ == "__main__":
    main()
