"""Triton's kernels in a whole engine on a CPU: by Triton's interpreter, and as planned for a GPU that is not here.

vLLM's model runner V2, which is the default on GPUs from 0.32 on, is made of such kernels too. It takes a CPU where
Triton has a back end for CPUs, and the interpreter stands for one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def start(gpu: str) -> None:
    """Plan for a GPU, and give the host bounds of the lengths, as on a GPU. To be called before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(str(Path(__file__).parents[3] / "plugins" / "triton" / "tests"))
    importlib.import_module("triton_interpreter")
    from triton.backends import backends
    from triton.runtime.interpreter import InterpretedFunction

    InterpretedFunction.constexprs = property(_constexprs)
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    from vllm import _custom_ops

    from attn_select.runtime import loaded_backend
    from attn_select_vllm import names
    from attn_select_vllm.kernels import batch, binding, limits

    loaded_backend.device_of = lambda selection, device: torch.device(device)
    binding.select = functools.partial(selected_for, gpu, binding.select)
    batch._lengths_on_the_host = _bounds
    limits.packs_caches = lambda: False  # on a GPU all backends write alike
    _custom_ops.concat_and_cache_mla = _concat_and_cache_mla
    names.PAIRS["FLASH_ATTN_TRITON_ATTN"] = ("TORCH_SDPA", "TRITON_ATTN")  # FlashAttention has no interpreter


def _constexprs(function: Any) -> list[int]:
    """Return which parameters are constants, as a compiled function does: vLLM counts them."""
    annotations = [each.annotation for each in inspect.signature(function.fn).parameters.values()]
    return [place for place, annotation in enumerate(annotations) if "constexpr" in str(annotation)]


def _concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *_: Any, **__: Any
) -> None:
    """Write latents in the layout that GPUs have; vLLM's operation for CPUs packs them. Scales are 1 here."""
    kept = slot_mapping >= 0
    rows = torch.cat([kv_c[: len(kept)], k_pe[: len(kept)].reshape(len(kept), -1)], dim=-1)
    kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping[kept]] = rows[kept].to(kv_cache.dtype)


def selected_for(gpu: str, select: Any, config: Any, device: Any, rules: Any, **options: Any) -> Any:
    """Return what ``select`` gives for a GPU, whatever device is asked for."""
    return select(config, gpu, rules, **options)


def _bounds(common: Any) -> Tensor:
    bounds: Tensor = common.seq_lens_cpu_upper_bound
    _SEEN.append(bool((bounds != common.seq_lens).any()))
    return bounds


_SEEN: list[bool] = []


def bounded_steps() -> int:
    """Return how many steps had lengths that the host did not know."""
    return sum(_SEEN)
