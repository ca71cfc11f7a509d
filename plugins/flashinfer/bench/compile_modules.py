"""Compile FlashInfer's modules for the conformance suites and the timed layers, on a machine with nvcc, without a GPU.

Run ``python plugins/flashinfer/bench/compile_modules.py OUT [NAME ...]`` with the flashinfer-python that will be used.
Each module lands at ``OUT/MODULE/MODULE.so``. Copied to ``flashinfer/data/aot`` of the installed package they are
loaded from there, and nothing is compiled at the first call. XQA and MLA take about a minute of a core, fa2 five to ten
and fa3 twenty. ``--list`` names the modules.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")

import torch
from flashinfer.attention._core import attention_sink_decl
from flashinfer.jit.attention import (
    gen_batch_mla_module,
    gen_batch_prefill_module,
    gen_customize_batch_prefill_module,
    modules,
)
from flashinfer.jit.xqa import gen_xqa_module

BF16, F16, E4M3, I32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32
Made = Callable[[], Any]


def prefill(
    backend: str, query: Any, cache: Any, size: int, value_size: int = 0, window: bool = False, cap: bool = False
) -> Made:
    """Return what makes a paged or ragged kernel; fa2's serves native decode too."""
    output = BF16 if query == E4M3 else query
    sizes = (size, value_size or size)
    made = gen_batch_prefill_module
    if backend == "fa2":  # of 0.7.2 on its wrappers load one for equal strides of K and V
        made = getattr(modules, "_gen_batch_prefill_primary_module", made)
    return lambda: made(backend, query, cache, output, I32, *sizes, 0, window, cap, False)


def mla(backend: str, query: Any, cache: Any) -> Made:
    """Return what makes a kernel on the latent cache."""
    return lambda: gen_batch_mla_module(backend, query, cache, query, I32, 512, 64, False)


def xqa(page: int, size: int, cache: Any = BF16, window: bool = False, drafts: int = 0, group: int = 4) -> Made:
    """Return what makes an XQA kernel for ``group`` query heads per KV head."""
    return lambda: gen_xqa_module(BF16, cache, page, size, group, window, BF16, 1 + drafts)


def sinks(backend: str, window: bool) -> Made:
    """Return what makes a kernel with attention sinks for heads of 64, named as ``native_wrappers`` names it."""
    uri = f"attn_select_sink_{backend}_bfloat16_kv_bfloat16_head_64_swa_{window}".lower()
    given = (["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", attention_sink_decl[backend])
    return lambda: gen_customize_batch_prefill_module(
        backend, uri, BF16, BF16, BF16, I32, 64, 64, *given, use_sliding_window=window
    )


MODULES: dict[str, Made] = {
    "mla-fa3": mla("fa3", BF16, BF16),
    "mla-fa3-fp8": mla("fa3", BF16, E4M3),
    "mla-fa3-float16": mla("fa3", F16, F16),
    "mla-fa2": mla("fa2", BF16, BF16),
    "mla-fa2-float16": mla("fa2", F16, F16),
    "xqa": xqa(16, 128),
    "xqa-fp8": xqa(16, 128, E4M3),
    "xqa-draft": xqa(16, 128, drafts=1),
    "xqa-window": xqa(32, 64, window=True),
    "xqa-sinks": xqa(64, 64),
    # Llama-2's, Gemma-3's and gpt-oss's layers, and three drafts
    "xqa-mha": xqa(16, 128, group=1),
    "xqa-gemma": xqa(16, 128, window=True, group=2),
    "xqa-gpt-oss": xqa(16, 64, window=True, group=8),
    "xqa-three-drafts": xqa(16, 128, drafts=3),
    # the most frequent of those that a survey draws
    "xqa-64": xqa(16, 64),
    "xqa-64-mha": xqa(16, 64, group=1),
    "xqa-64-sinks": xqa(16, 64, group=8),
    "xqa-group5": xqa(16, 128, group=5),
    "xqa-group8": xqa(16, 128, group=8),
    "xqa-group16": xqa(16, 128, group=16),
    "xqa-256-fp8": xqa(16, 256, E4M3),
    "fa3-64": prefill("fa3", BF16, BF16, 64),
    "fa3-256": prefill("fa3", BF16, BF16, 256),
    "fa3-window-128": prefill("fa3", BF16, BF16, 128, window=True),
    "fa3-sinks-window": sinks("fa3", window=True),
    "fa2-cap": prefill("fa2", BF16, BF16, 128, cap=True),
    "fa2-cap-window": prefill("fa2", BF16, BF16, 128, window=True, cap=True),
    "fa2": prefill("fa2", BF16, BF16, 128),
    "fa2-fp8": prefill("fa2", BF16, E4M3, 128),
    "fa2-sinks": sinks("fa2", window=False),
    "fa2-ragged": prefill("fa2", BF16, BF16, 192, 128),
    "fa3": prefill("fa3", BF16, BF16, 128),
    "fa3-fp8": prefill("fa3", E4M3, E4M3, 128),
    "fa3-window": prefill("fa3", BF16, BF16, 64, window=True),
    "fa3-sinks": sinks("fa3", window=False),
    "fa3-ragged": prefill("fa3", BF16, BF16, 192, 128),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to fill")
    parser.add_argument("names", nargs="*", metavar="NAME", help="modules to compile (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names and what FlashInfer calls the modules")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in MODULES]:
        parser.error(f"no module {', '.join(unknown)} (there are {', '.join(MODULES)})")
    for name in arguments.names or MODULES:
        spec, start = MODULES[name](), time.monotonic()
        target = arguments.out / spec.name / f"{spec.name}.so"
        if arguments.list or target.exists():
            print(name, spec.name, "" if arguments.list else "is there", flush=True)
            continue
        spec.build(verbose=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spec.jit_library_path, target)
        print(f"{name} {spec.name} in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
