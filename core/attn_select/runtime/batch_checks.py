"""``BatchChecks``: batches and calls of layers against what their group was made for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_select.layer.config import AttentionConfig
from attn_select.runtime import checks
from attn_select.runtime.capacity import Capacity
from attn_select.runtime.group_cache import GroupCache
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.overlaps import check_no_self_overlap, check_overlaps
from attn_select.runtime.scales import Scales

_CONTENTS = ("query", "key", "value", "kv_c_normed", "k_pe")
"""What a layer is given that must hold finite numbers; outputs are poisoned in tests."""
_WRITTEN = ("output", "output_lse", "output_block_scale")
"""What a layer is given to write, beside its cache."""
_OF_BATCHES = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")


class BatchChecks:
    """Checks the steps of one group; ``checked``: their contents too, which synchronises with the device."""

    # ``block_size`` counts tokens per block of the batches' tables; across ranks the cache's blocks are a rank's
    # share.

    def __init__(
        self,
        config: AttentionConfig,
        capacity: Capacity,
        block_size: int | None,
        cache: GroupCache,
        checked: bool,
    ) -> None:
        self.config, self.capacity, self.block_size = config, capacity, block_size
        self.cache, self.device, self.checked = cache, cache.device, checked
        self._last_batch: CommonAttentionMetadata | None = None

    def batch(self, common: CommonAttentionMetadata) -> None:
        """As ``LayerGroup.check_batch``."""
        if not isinstance(common, CommonAttentionMetadata):
            what = "None" if common is None else f"a {type(common).__name__}"
            raise BatchError(f"common_attn_metadata is {what}: accepted is what prepare_batch returns")
        capacity = self.capacity
        if common.num_reqs > capacity.max_num_seqs or common.num_actual_tokens > capacity.max_num_batched_tokens:
            raise BatchError(
                f"a batch of {common.num_reqs} requests and {common.num_actual_tokens} tokens: this group was made for "
                f"max_num_seqs = {capacity.max_num_seqs} and max_num_batched_tokens = "
                f"{capacity.max_num_batched_tokens}",
                hint="make it with a larger Capacity, or split the batch",
            )
        if self.config.has_cache and (common.block_table_tensor is None or common.slot_mapping is None):
            missing = "block_table_tensor" if common.block_table_tensor is None else "slot_mapping"
            raise BatchError(f"{missing} is None: layers with a KV cache need it")
        if common.block_size is not None and self.block_size not in (None, common.block_size):
            raise BatchError(
                f"block_size = {common.block_size}: the batch's block table counts in blocks of that many tokens, but "
                f"this group's cache has blocks of {self.block_size}",
                hint="make the BlockTable with group.block_size; groups of other block sizes need tables of their own",
            )
        if common.mm_prefix_ranges is not None and not self.config.mm_prefix:
            text = "mm_prefix_ranges given, but the layers were selected with mm_prefix = False"
            raise BatchError(text, hint="select with mm_prefix = True")
        if common.tree_mask is not None:
            checks.check_tree_mask(common, self.config)
        if not common.causal and self.config.attention_chunk_size is not None:
            raise BatchError("causal = False, but the layers attend inside chunks, up to each query (accepted: True)")
        checks.check_shapes(common, self.config, self.block_size)
        if self.checked:
            self._last_batch = common
            checks.check_common(common, self.config, self.device, self.block_size, capacity.max_model_len)

    def prefix(self, common: CommonAttentionMetadata, prefix: int) -> None:
        """Compare a common prefix with the blocks and with what every request had cached."""
        if self.block_size is None:
            raise BatchError(f"common_prefix_len = {prefix}: layers without a KV cache share no prefix; pass 0")
        assert common.block_table_tensor is not None
        if prefix < 0 or prefix % self.block_size:
            raise BatchError(f"common_prefix_len = {prefix}: accepted are multiples of block_size = {self.block_size}")
        computed = common.num_computed_tokens_cpu
        if prefix > int(computed.min()):
            request = int(computed.argmin())
            raise BatchError(
                f"common_prefix_len = {prefix}: request {request} had {int(computed[request])} tokens cached before "
                "this step, and accepted is at most that"
            )
        if self.checked:
            checks.check_common_prefix(common.block_table_tensor, prefix, self.block_size)

    def contents(
        self,
        scales: Scales,
        tensors: Mapping[str, Tensor | None],
        kv_cache: Tensor | None,
        common: CommonAttentionMetadata,
    ) -> None:
        """As ``LayerGroup.check_contents``."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        # The builders' buffers persist, so metadata of an earlier step now holds numbers of the later one.
        if common is not self._last_batch:
            raise BatchError(
                "attn_metadata is of an earlier step: group.build has since built another one in the same memory",
                hint="give the layers what the last group.build(common) returned",
            )
        written = {name: tensor for name, tensor in tensors.items() if name in _WRITTEN}
        read = {name: tensor for name, tensor in tensors.items() if name not in _WRITTEN}
        read |= {"q_scale": scales.q, "k_scale": scales.k, "v_scale": scales.v}
        read |= {name: getattr(common, name) for name in _OF_BATCHES}
        for name, tensor in written.items():
            check_no_self_overlap(name, tensor)
        check_overlaps({**written, "kv_cache": kv_cache}, read)
        for name, tensor in tensors.items():
            if tensor is not None:
                checks.check_strides(name, tensor, self.device)
                if name in _CONTENTS:
                    of_requests = name == "query" or self.config.attn_type != "encoder_decoder"
                    checks.check_finite(name, tensor, common, of_requests)
        checks.check_scales(scales)
        if self.cache.kv_layout is None or self.cache.kernel_block_size is None or self.block_size is None:
            return
        cache_blocks = self.cache.num_blocks(kv_cache)
        assert kv_cache is not None
        checks.check_strides("kv_cache", kv_cache, self.device)
        checks.check_blocks(common, self.config, kv_cache, self.cache.kv_layout, cache_blocks, self.block_size)
        if (indices := tensors.get("topk_indices")) is not None:
            checks.check_indices(indices, common, cache_blocks * self.block_size, self.block_size)
