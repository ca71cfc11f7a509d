"""``CacheFormat`` and ``StateFormat``: what two sides must share to exchange a layer's cache or states, and a short id.

Where prefills run on one GPU and decodes on another, blocks are copied byte by byte. Nothing in these bytes says how
they lie, so both sides compare the id before the first copy.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_select.layer import layouts
from attn_select.layer.config import AttentionConfig
from attn_select.layer.dtypes import is_quantized
from attn_select.layer.state import StateConfig


class Format(ABC):
    """How one layer's cache lies in memory, and what its bytes mean.

    Attributes:
        prefix: of the ids, with their version: it changes when equal ids would no longer mean equal bytes.
        converted: the facts in which a cache can be converted; the others say which heads and tokens a rank keeps.
    """

    __slots__ = ()
    prefix: ClassVar[str]
    converted: ClassVar[tuple[str, ...]]

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what both sides must share, as plain data. Equal facts: the same bytes are the same numbers."""

    @property
    def fingerprint(self) -> str:
        """The id, the prefix and 12 hexadecimal digits: the same in every process, release and machine.

        It does not hold the values of FP8 scales, which both sides take from one checkpoint.
        """
        text = json.dumps(self.facts(), sort_keys=True, separators=(",", ":"))
        return f"{self.prefix}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def differences(self, other: Format) -> dict[str, tuple[Any, Any]]:
        """Return each fact that is not shared: its value here and there. Empty: the cache can be exchanged."""
        here, there = self.facts(), other.facts()
        return {name: (value, there.get(name)) for name, value in here.items() if value != there.get(name)}


@dataclass(frozen=True, slots=True)
class CacheFormat(Format):
    """How the blocks of one layer's cache lie in memory, and what their bytes mean.

    A block is contiguous in its layout, so layout, sizes and dtype say all strides.

    Attributes:
        config: the layer, per rank.
        layout: name from ``attn_select.layer.layouts``.
        block_size: tokens per block of the allocator.
        kernel_block_size: tokens per block in which the cache is laid out; divides ``block_size``.
        interleave: with context parallelism, neighbouring positions that one rank keeps
            (``ContextParallel.interleave``).
    """

    prefix: ClassVar[str] = "kv1"
    converted: ClassVar[tuple[str, ...]] = ("dtype", "scales", "block_size", "kernel_block_size", "layout")

    config: AttentionConfig
    layout: str
    block_size: int
    kernel_block_size: int
    interleave: int = 1

    def facts(self) -> dict[str, Any]:
        """Return what both sides must share, as plain data. Equal facts mean that the same bytes are the same numbers.

        Two formats that differ in name alone have equal facts: ``FLASHINFER_HND`` of one head is ``FLASHINFER_NHD``,
        and where tokens lie one behind the other, the kernel's blocks leave no trace.
        """
        config = self.config
        dtype = "fp8_ds_mla" if self.layout == layouts.FP8_DS_MLA else config.cache_dtype
        one_head = self.layout == layouts.FLASHINFER_HND and config.num_kv_heads == 1
        split = self.layout in layouts.SPLIT_IN_PLACE
        ranks = config.decode_context_parallel_size
        return {
            "dtype": dtype,
            "scales": _scales(config, dtype),
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
            "value_head_size": config.kv_lora_rank or config.value_head_size,
            "decode_context_parallel_size": ranks,
            "interleave": self.interleave if ranks > 1 else 1,
            "block_size": self.block_size,
            "kernel_block_size": self.block_size if split else self.kernel_block_size,
            "layout": layouts.FLASHINFER_NHD if one_head else self.layout,
        }


def _scales(config: AttentionConfig, dtype: str) -> str:
    """Return how many scales there are beside the stored numbers, or among them."""
    if dtype in ("fp8_ds_mla", "nvfp4"):
        return "stored"
    if not is_quantized(dtype):
        return "none"
    return "per_head" if config.per_head_quant_scales else "per_tensor"


@dataclass(frozen=True, slots=True)
class StateFormat(Format):
    """How the states of one layer lie in memory, and the windows of its convolution beside them."""

    prefix: ClassVar[str] = "st1"
    converted: ClassVar[tuple[str, ...]] = ("state_dtype", "conv_dtype", "state_layout")

    config: StateConfig
    layout: str  # name of ``attn_select.layer.layouts.STATE_LAYOUTS``

    def facts(self) -> dict[str, Any]:
        """Return what both sides must share, as plain data. Equal facts mean that the same bytes are the same numbers.

        Every recurrence keeps the same state (``attn_select.layer.state``): its name is no fact.
        """
        config = self.config
        keys, values = config.num_heads * config.head_size, config.num_v_heads * config.v_head_size
        widths = {"query": keys, "key": keys, "value": values}
        convolved = config.conv_kernel_size > 0
        return {
            "state_dtype": config.state_dtype,
            "num_v_heads": config.num_v_heads,
            "head_size": config.head_size,
            "v_head_size": config.v_head_size,
            "state_layout": self.layout,
            "conv_kernel_size": config.conv_kernel_size,
            "conv_channels": [[name, widths[name]] for name in config.rule.channels] if convolved else [],
            "conv_dtype": config.dtype if convolved else None,
        }
