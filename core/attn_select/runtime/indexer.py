"""``SparseIndexer``: which cached tokens each query of a sparse MLA layer attends to (DeepSeek Sparse Attention).

The lightning indexer of DeepSeek-V3.2 and GLM-5 scores every token of a request against each query and keeps the best
``sparse_top_k``::

    score[t, s] = sum_h weights[t, h] * relu(query[t, h] . key[s])        over the tokens s up to t

(deepseek-ai/DeepSeek-V3.2-Exp, DeepSeek_V3_2.pdf section 2.1 and inference/model.py, class Indexer). A model projects,
normalises and rotates ``query`` and ``key``, and folds its factors into ``weights``: in DeepSeek-V3.2
``weights_proj(x) * num_heads ** -0.5 * head_dim ** -0.5``.

The keys have a paged cache of their own, beside the latents': the same blocks, tables and slots, so the engine's block
pool serves both. In FP8 a block holds the e4m3 codes of all its tokens, then one float32 scale a token, as in vLLM
(csrc/cache_kernels.cu, indexer_k_quant_and_cache) and DeepGEMM (fp8_paged_mqa_logits). Layers that share their choice
(GLM-5's ``indexer_types``) take the same ``topk_indices``. Over several ranks each holds the keys of all tokens, and
all choose the same.
"""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor

from attn_select.errors import ConfigError
from attn_select.runtime import checks, ops
from attn_select.runtime.attention import foreign_metadata
from attn_select.runtime.integers import size
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.mla_group import MLALayerGroup
from attn_select.runtime.step_metadata import AttentionMetadata
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES
from attn_select.runtime.torch_indexer import IndexedRows

NUM_HEADS, HEAD_DIM = 64, 128
"""Of DeepSeek-V3.2 (``index_n_heads``, ``index_head_dim``)."""
SCALE_BYTES = 4


class SparseIndexer:
    """The indexer of the sparse MLA layers of a group. It has no weights: one serves all layers.

    Args:
        group: of sparse MLA layers; its ``sparse_top_k`` tokens are chosen, from its batches' tables.
        num_heads: indexer heads; all of them, whatever the tensor-parallel rank.
        head_dim: of the indexer's queries and keys, in FP8 a multiple of 4.
        cache_dtype: ``fp8_e4m3``, or ``auto`` for the compute dtype, where queries and keys are not quantised.

    Raises:
        ConfigError: the group's layers are not sparse MLA, or a size or the dtype is not accepted.
    """

    def __init__(
        self,
        group: MLALayerGroup,
        *,
        num_heads: int = NUM_HEADS,
        head_dim: int = HEAD_DIM,
        cache_dtype: Literal["fp8_e4m3", "auto"] = "fp8_e4m3",
    ) -> None:
        if not group.config.sparse or group.block_size is None:
            raise ConfigError(
                "the group's layers are not sparse MLA, so they choose no tokens (accepted: layers with sparse_top_k)",
                fields=["sparse_top_k"],
            )
        if cache_dtype not in ("fp8_e4m3", "auto"):
            raise ConfigError(f"cache_dtype = {cache_dtype!r}: accepted are fp8_e4m3, auto", fields=["cache_dtype"])
        self.group, self.num_heads, self.head_dim = group, size("num_heads", num_heads), size("head_dim", head_dim)
        if cache_dtype == "fp8_e4m3" and self.head_dim % 4:
            raise ConfigError(f"head_dim = {head_dim}: accepted are multiples of 4", fields=["head_dim"])
        self.block_size = group.block_size
        self.top_k = cast(int, group.config.sparse_top_k)
        self._dtype = PLAIN_DTYPES[group.config.dtype]
        fp8 = cache_dtype == "fp8_e4m3"
        self._stored = (torch.uint8, head_dim + SCALE_BYTES) if fp8 else (self._dtype, head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one layer takes beside its latent."""
        dtype, width = self._stored
        return width * dtype.itemsize

    def allocate_cache(self, num_blocks: int) -> Tensor:
        """Return one layer's cache of indexer keys for ``num_blocks`` of the allocator's blocks, zeroed.

        uint8 ``(num_blocks, block_size, head_dim + 4)`` in FP8, else ``(num_blocks, block_size, head_dim)``.

        Raises:
            ConfigError: ``num_blocks`` is below 1.
        """
        dtype, width = self._stored
        return torch.zeros(
            size("num_blocks", num_blocks), self.block_size, width, dtype=dtype, device=self.group.device
        )

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        attn_metadata: AttentionMetadata,
        topk_indices: Tensor | None = None,
    ) -> Tensor:
        """Write the step's keys into the cache, and return the slots that each token attends to.

        Args:
            query: ``(T', num_heads, head_dim)`` in the compute dtype, rope applied; T' at least ``num_actual_tokens``.
            key: ``(T', head_dim)``, likewise.
            weights: float32 ``(T', num_heads)``, the model's factors included.
            index_cache: one layer's cache (``allocate_cache``).
            attn_metadata: what the group's ``build`` returned.
            topk_indices: int32 ``(T', sparse_top_k)``, written; None makes one. Rows behind ``num_actual_tokens`` are
                left alone.

        Returns:
            ``topk_indices`` for ``MLAAttention.forward``: physical slots of the latent cache in any order, -1 behind a
            token's last one. A token may choose its own slot, too.

        Raises:
            BatchError: another group built the metadata, or an argument has a shape or dtype that is not accepted.
        """
        metadata = attn_metadata
        if getattr(metadata, "group", None) is not self.group:
            raise foreign_metadata("the indexer: attn_metadata", metadata)
        tokens = metadata.num_actual_tokens
        if topk_indices is None:
            topk_indices = query.new_empty(query.shape[0], self.top_k, dtype=torch.int32)
        given = {
            "query": (query, (self.num_heads, self.head_dim), self._dtype),
            "key": (key, (self.head_dim,), self._dtype),
            "weights": (weights, (self.num_heads,), torch.float32),
            "topk_indices": (topk_indices, (self.top_k,), torch.int32),
        }
        for name, (tensor, shape, dtype) in given.items():
            checks.check_rows(name, tensor, shape, dtype, tokens)
        self._check_cache(index_cache)
        ops.indexer_k_quant_and_cache(key[:tokens], index_cache, metadata.common.slot_mapping)
        if tokens:
            rows, own = self._rows(metadata), (query[:tokens], weights[:tokens])
            ops.indexer_topk(*own, index_cache, rows, self.block_size, topk_indices[:tokens])
        return topk_indices

    def _check_cache(self, index_cache: Tensor) -> None:
        dtype, width = self._stored
        if index_cache.dtype != dtype or index_cache.ndim != 3 or index_cache.shape[1:] != (self.block_size, width):
            raise BatchError(
                f"index_cache is {index_cache.dtype} of shape {tuple(index_cache.shape)}: accepted is {dtype} "
                f"(num_blocks, {self.block_size}, {width})"
            )

    def _rows(self, metadata: AttentionMetadata) -> IndexedRows:
        """Return what each token may choose from; the first layer of a step makes it for all."""
        if metadata.indexed_rows is None:
            metadata.indexed_rows = indexed_rows(metadata.common)
        return metadata.indexed_rows


def indexed_rows(common: CommonAttentionMetadata) -> IndexedRows:
    """Return which keys each token of a causal batch sees. Does not synchronise."""
    assert common.block_table_tensor is not None
    bounds, device = common.query_start_loc, common.seq_lens.device
    token = torch.arange(common.num_actual_tokens, dtype=torch.int32, device=device)
    # right=True: the token at which a request begins belongs to that request. Tokens of padding are behind all
    # requests.
    request = torch.searchsorted(bounds[1:], token, right=True, out_int32=True)
    padding = request >= common.num_reqs
    request.clamp_max_(common.num_reqs - 1)
    # How many of its request's tokens stand behind this one: it sees so many keys fewer than the request has.
    later = bounds[1:].index_select(0, request) - 1 - token
    num_keys = (common.seq_lens.index_select(0, request) - later).clamp_min_(0).masked_fill_(padding, 0)
    seq_lens = common.seq_lens_cpu.tolist()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # While a graph is captured the host's lengths say nothing of later replays; this bounds all of them.
        seq_lens = [common.max_seq_len] * common.num_reqs
    bounds_cpu = common.query_start_loc_cpu.tolist()
    return IndexedRows(request, num_keys, common.block_table_tensor, bounds_cpu, seq_lens, max(seq_lens, default=0))
