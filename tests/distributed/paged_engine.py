"""An engine of few lines: a transformers model that generates through our layers, on one rank or on several."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from attn_select import AttentionConfig, select
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BlockPool,
    BlockTable,
    Capacity,
    ContextParallel,
    MLAAttention,
    MLALayerGroup,
    SparseIndexer,
    attention_group,
    prepare_batch,
)

NEW_TOKENS = 64
PROMPTS = (5, 37, 18, 70)
IMAGE = (1, 4)
"""Positions of an image's tokens in every prompt, where a model takes images."""
MAX_TOKENS = 48
"""Of one step: the longer prompts take two or more."""


class Engine:
    """Serves a transformers model: one attention group per kind of layer, one block table for all.

    Args:
        model: on several ranks each has it whole; of sharded queries each attends with its own heads.
        block_size: of the block table.
        ranks: those that the caches lie on; None: one.
    """

    def __init__(self, model: Any, block_size: int = 16, ranks: ContextParallel | None = None) -> None:
        self.model, self.ranks = model, ranks
        self.shards = ranks.size if ranks is not None and ranks.sharded else 1
        total = sum(PROMPTS) + len(PROMPTS) * NEW_TOKENS
        longest = max(PROMPTS) + NEW_TOKENS
        capacity = Capacity(len(PROMPTS), MAX_TOKENS, longest)
        self.pool = BlockPool(total // block_size + 2 * len(PROMPTS), block_size)
        self.table = BlockTable(len(PROMPTS), -(-longest // block_size), block_size, "cpu")
        self.groups: dict[AttentionConfig, AttentionGroup] = {}
        self.layers: list[Any] = []
        self.caches: list[Tensor] = []
        self.source: list[int] = []
        """``source_of`` each layer."""
        self.metadata: dict[AttentionGroup, Any] = {}
        text = getattr(model.model, "language_model", None)
        self.images = [] if text is None else [IMAGE]
        for module in (layer.self_attn for layer in (text or model.model).layers):
            config = self.config_of(module, block_size).model_copy(update={"mm_prefix": bool(self.images)})
            if ranks is not None:
                shares = {"decode_context_parallel_size": ranks.size, "block_size": block_size // ranks.size}
                config = config.model_copy(update={**shares, "num_heads": config.num_heads // self.shards})
            if config not in self.groups:
                options: dict[str, Any] = {"workspace_tokens": 40} if config.mla else {}
                options["context_parallel"] = ranks
                self.groups[config] = attention_group(select(config, "cpu"), capacity=capacity, **options)
            group, source = self.groups[config], self.source_of(module)
            if isinstance(group, MLALayerGroup):
                weight = self.own_heads(module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1)), 1).flatten(0, 1)
                self.layers.append(MLAAttention(group, weight, scale=module.scaling))
                module.expand_kv = lambda kv_nope, k_rot: (kv_nope, k_rot)  # our layer expands, or absorbs
            else:
                target = None if source == module.layer_idx else self.layers[source]
                self.layers.append(Attention(group, scale=module.scaling, kv_sharing_target=target))
            if getattr(module, "indexer", None) is not None:
                module.indexer.forward = self.indexer_of(module, group)
            cache = group.allocate_kv_cache(self.pool.num_blocks)
            self.caches.append(cache.fill_(float("nan")))
            self.source.append(source)

    @staticmethod
    def source_of(module: Any) -> int:
        """Return the layer whose cache a layer reads: its own, or with shared keys the last one of its kind."""
        if not getattr(module, "is_kv_shared_layer", False):
            return int(module.layer_idx)
        kinds = module.config.layer_types[: -module.config.num_kv_shared_layers]
        return max(i for i, kind in enumerate(kinds) if kind == module.layer_type)

    def indexer_of(self, module: Any, group: AttentionGroup) -> Any:
        """Return what stands in for the forward of a layer's indexer: its own projections, then our choice."""
        assert isinstance(group, MLALayerGroup)
        own, rope = module.indexer, module.indexer.qk_rope_head_dim
        indexer = SparseIndexer(group, num_heads=own.n_heads, head_dim=own.head_dim, cache_dtype="auto")
        index_cache = indexer.allocate_cache(self.pool.num_blocks).fill_(float("nan"))
        modeling = sys.modules[type(module).__module__]
        interleaved = modeling.__name__.endswith("glm_moe_dsa")
        rotate = modeling.apply_rotary_pos_emb_interleave if interleaved else modeling.apply_rotary_pos_emb

        def choose(hidden: Tensor, q_resid: Tensor, rotations: Any, *_: Any, **__: Any) -> Tensor:
            query = own.wq_b(q_resid).view(1, -1, own.n_heads, own.head_dim)
            key = own.k_norm(own.wk(hidden)).unsqueeze(2)
            turned = rotate(query[..., :rope], key[..., :rope], *rotations, unsqueeze_dim=2)
            query, key = (torch.cat([t, x[..., rope:]], -1)[0] for t, x in zip(turned, (query, key), strict=True))
            weights = own.weights_proj(hidden)[0] * (own.n_heads * own.head_dim) ** -0.5
            return indexer(query, key[:, 0], weights, index_cache, self.metadata[group])[None]

        return choose

    @staticmethod
    def config_of(module: Any, block_size: int) -> AttentionConfig:
        config = module.config
        shared: dict[str, Any] = {"dtype": "float32", "block_size": block_size, "num_heads": config.num_attention_heads}
        if hasattr(config, "kv_lora_rank"):
            names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            sparse = {"sparse_top_k": config.index_topk} if hasattr(config, "index_topk") else {}
            return AttentionConfig(**shared, **sparse, **{name: getattr(config, name) for name in names})
        window = getattr(config, "sliding_window", None)
        types = getattr(config, "layer_types", None)
        chunked = types is not None and types[module.layer_idx] == "chunked_attention"
        return AttentionConfig(
            **shared,
            num_kv_heads=config.num_attention_heads // module.num_key_value_groups,
            head_size=module.head_dim,
            sliding_window=module.sliding_window if hasattr(module, "sliding_window") else window,
            attention_chunk_size=config.attention_chunk_size if chunked else None,
            logits_soft_cap=getattr(config, "attn_logit_softcapping", None),
        )

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, indices: Tensor | None) -> Tensor:
        """Run one layer on ``(1, heads, tokens, size)`` tensors; return ``(1, tokens, heads, size)``."""
        layer, source = self.layers[module.layer_idx], self.source[module.layer_idx]
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        query = self.own_heads(query.transpose(0, 1), layer.group.config.num_kv_heads).transpose(0, 1)
        if isinstance(layer, MLAAttention):
            key, value = key[:, 0], value[:, 0]
        new = (key, value) if source == module.layer_idx else (None, None)
        chosen = {} if indices is None else {"topk_indices": indices[0]}
        output: Tensor = layer(query, *new, self.caches[source], self.metadata[layer.group], **chosen)
        return self.all_heads(output, layer.group.config.num_kv_heads)[None]

    def own_heads(self, heads: Tensor, kv_heads: int) -> Tensor:
        """Return this rank's of all query heads ``(H, …)``: of each KV head as many."""
        if self.ranks is None or self.shards == 1:
            return heads
        return heads.unflatten(0, (kv_heads, self.shards, -1))[:, self.ranks.rank].flatten(0, 1)

    def all_heads(self, output: Tensor, kv_heads: int) -> Tensor:
        """Return the outputs of all query heads, ``(tokens, H, size)``, of every rank's own."""
        if self.ranks is None or self.shards == 1:
            return output
        gathered = output.new_empty(self.shards, *output.shape)
        self.ranks.collectives.all_gather(gathered, output)
        return gathered.unflatten(2, (kv_heads, -1)).permute(1, 2, 0, 3, 4).flatten(1, 3)

    def step(self, tokens: list[list[int]], seq_lens: list[int], requests: list[int]) -> list[int]:
        """Run one batch; return the next token of each request."""
        for row, request in enumerate(requests):
            self.pool.allocate(request, seq_lens[row])
            self.table.set_row(row, self.pool.blocks(request))
        lens = [len(part) for part in tokens]
        images = [self.images] * len(lens) if self.images else None
        common = prepare_batch(lens, seq_lens, self.table, mm_prefix_ranges=images)
        self.metadata = {group: group.build(common) for group in self.groups.values()}
        positions = [torch.arange(seq_len - count, seq_len) for seq_len, count in zip(seq_lens, lens, strict=True)]
        packed = torch.tensor([token for part in tokens for token in part])
        logits = self.model(input_ids=packed[None], position_ids=torch.cat(positions)[None], use_cache=False).logits[0]
        return logits[common.query_start_loc[1:].long() - 1].argmax(-1).tolist()

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Continuous batching, decodes first."""
        texts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
        wanted = [len(prompt) + NEW_TOKENS for prompt in prompts]
        while any(len(text) < want for text, want in zip(texts, wanted, strict=True)):
            running = [r for r in range(len(texts)) if len(texts[r]) < wanted[r]]
            decodes = [r for r in running if len(texts[r]) - done[r] == 1]
            batch = {r: 1 for r in decodes}
            for request in running:
                if request not in batch and (room := MAX_TOKENS - sum(batch.values())):
                    batch[request] = min(room, len(texts[request]) - done[request])
            tokens = [texts[r][done[r] : done[r] + count] for r, count in batch.items()]
            seq_lens = [done[r] + count for r, count in batch.items()]
            for request, token in zip(batch, self.step(tokens, seq_lens, list(batch)), strict=True):
                done[request] += batch[request]
                if done[request] == len(texts[request]):
                    texts[request].append(token)
        return texts


def generated(model: Any, prompts: list[list[int]], ranks: ContextParallel | None = None) -> list[list[int]]:
    """Return the prompts with ``NEW_TOKENS`` more, greedily; every request gives its blocks back."""
    import transformers

    engine = Engine(model, ranks=ranks)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, indices: Any = None, **__: Any
    ) -> tuple[Tensor, None]:
        return engine.attend(module, query, key, value, indices), None

    # A name of this engine's own: the adapter may have registered "attn_select" in this process, and keeps it.
    transformers.AttentionInterface.register("paged_engine", attention)
    # Layers with an indexer cut the mask for it; nothing reads it.
    mask = torch.zeros(1, 1, 1, 1) if any("indexer" in name for name, _ in model.named_modules()) else None
    transformers.AttentionMaskInterface.register("paged_engine", lambda *_, **__: mask)
    model.set_attn_implementation("paged_engine")
    texts = engine.generate(prompts)
    for request in range(len(prompts)):
        engine.pool.free(request)
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
    return texts
