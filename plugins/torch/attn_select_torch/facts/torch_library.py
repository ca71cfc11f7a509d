"""What torch itself can do, and what ``TORCH_SDPA`` and ``TORCH_MLA`` have in common."""

from __future__ import annotations

from attn_select.backends.spec import ComputeCapabilities, Fact, Library
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device

TORCH = Library("torch", "torch", "pip install torch numpy", ">=2.9")
"""2.9 has ``AuxRequest``, by which FlexAttention's log-sum-exp is asked for (flex_attention.py v2.9.0; v2.7.0 has
none); 2.8 brought ``out_dtype`` to ``bmm``."""

OWN = "own composition of torch operators"
RAN_ON_CPU = "ran on CPU, torch 2.13.0"

EVERY_DEVICE: Fact[ComputeCapabilities] = Fact(
    ComputeCapabilities((((5, 0), (12, 9)),), cpu=True),
    "pytorch/test-infra tools/pkg-helpers/pytorch_pkg_helpers/cuda.py get_cuda_arch_list: CUDA 12.6 wheels from 5.0, "
    "CUDA 13.0 wheels 7.5 to 12.0",
)
DTYPES: Fact[tuple[str, ...]] = Fact(("bfloat16", "float16", "float32"), RAN_ON_CPU)
KV_CACHE_DTYPES: Fact[tuple[str, ...]] = Fact(
    ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"),
    f"{OWN}: the gather converts to the compute dtype; {RAN_ON_CPU}; pytorch/pytorch c10/util/Float8_e4m3fn.h and "
    "Float8_e5m2.h (conversion in software, so on any GPU)",
)
MASKED = f"{OWN}: any mask or bias is added to the scores"
PER_REQUEST = f"{OWN}: one call per request, whose shapes depend on that request alone"
ANY_BLOCK = (16, 1)
"""Blocks are gathered by index, so any size does; 16 where nobody asks."""

PADDED_V = "K and V rows take as many elements in the cache as the wider of both"
_CUDA_12 = "compute capability below 7.5 needs a torch built for CUDA 12: CUDA 13 dropped it"
_EMULATED_BF16 = "bfloat16 is emulated below compute capability 8.0"
_ONE_CALL_EACH = "batch invariance: requests are computed one by one"


def notes(config: AttentionConfig, device: Device) -> tuple[str, ...]:
    """Return what a user should know about torch on this device, one clause each."""
    found: tuple[str, ...] = (_ONE_CALL_EACH,) if config.batch_invariant else ()
    capability = device.compute_capability
    if capability is not None and capability < (8, 0):
        if capability < (7, 5):
            found += (_CUDA_12,)
        if config.dtype == "bfloat16":
            found += (_EMULATED_BF16,)
    return found


def takes_varlen(config: AttentionConfig, capability: tuple[int, int] | None) -> bool:
    """Whether ``torch.nn.attention.varlen`` computes these layers: FlashAttention-2 with windows, without biases."""
    # Its limits are in pytorch/pytorch aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    return (
        capability is not None
        and capability >= (8, 0)
        and config.dtype in ("float16", "bfloat16")
        and config.head_size % 8 == 0
        and config.head_size <= 256
        and config.value_head_size == config.head_size
        and config.logits_soft_cap is None
        and not config.alibi
        and not config.mm_prefix
        and not config.draft_tree
    )
