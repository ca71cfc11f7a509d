"""Whole models from transformers generate through our layers: token for token what their own eager attention gives.

Random weights, float32, greedy. The requests are packed into one sequence of tokens: prompts are prefilled in chunks
while earlier requests decode, on a paged cache that is poisoned where nobody wrote.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select import AttentionConfig, select
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BlockPool,
    BlockTable,
    Capacity,
    MLAAttention,
    MLAAttentionGroup,
    SparseIndexer,
    attention_group,
    prepare_batch,
)

transformers = pytest.importorskip("transformers")

import models_for_tests as models  # noqa: E402

NEW_TOKENS = 64
PROMPTS = (5, 37, 18, 70)
MAX_TOKENS = 48
"""Of one step: the longer prompts take two or more."""


LONGER = (
    *(models.mistral, models.gemma2, models.llama4, models.gemma4, models.deepseek_v3),
    *(models.deepseek_v32, models.glm_moe_dsa),
)


class Engine:
    """Serves a transformers model: one attention group per kind of layer, one block table for all."""

    def __init__(self, model: Any, block_size: int = 16) -> None:
        self.model = model
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
        for module in (layer.self_attn for layer in model.model.layers):
            config = self.config_of(module, block_size)
            if config not in self.groups:
                options: dict[str, Any] = {"workspace_tokens": 40} if config.mla else {}
                self.groups[config] = attention_group(select(config, "cpu"), capacity=capacity, **options)
            group, source = self.groups[config], self.source_of(module)
            if isinstance(group, MLAAttentionGroup):
                weight = module.kv_b_proj.weight
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
        assert isinstance(group, MLAAttentionGroup)
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
        if isinstance(layer, MLAAttention):
            key, value = key[:, 0], value[:, 0]
        new = (key, value) if source == module.layer_idx else (None, None)
        chosen = {} if indices is None else {"topk_indices": indices[0]}
        output: Tensor = layer(query, *new, self.caches[source], self.metadata[layer.group], **chosen)
        return output[None]

    def step(self, tokens: list[list[int]], seq_lens: list[int], requests: list[int]) -> list[int]:
        """Run one batch; return the next token of each request."""
        for row, request in enumerate(requests):
            self.pool.allocate(request, seq_lens[row])
            self.table.set_row(row, self.pool.blocks(request))
        lens = [len(part) for part in tokens]
        common = prepare_batch(lens, seq_lens, self.table)
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


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "make",
    [models.llama, *(pytest.param(make, marks=pytest.mark.slow(guard="llama")) for make in LONGER)],
)
def test_tokens_are_those_of_eager_attention(make: Any) -> None:
    model = models.built(make)
    prompts = [torch.randint(model.config.vocab_size, (length,)).tolist() for length in PROMPTS]
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        wanted = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
            )[0].tolist()
            for prompt in prompts
        ]
        engine = Engine(model)

        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, indices: Any = None, **__: Any
        ) -> tuple[Tensor, None]:
            return engine.attend(module, query, key, value, indices), None

        # A name of this test's own: the adapter has registered "attn_select" in this process, and keeps it.
        transformers.AttentionInterface.register("engine_of_this_test", attention)
        # Layers with an indexer cut the mask for it; nothing reads it.
        mask = torch.zeros(1, 1, 1, 1) if any("indexer" in name for name, _ in model.named_modules()) else None
        transformers.AttentionMaskInterface.register("engine_of_this_test", lambda *_, **__: mask)
        model.set_attn_implementation("engine_of_this_test")
        got = engine.generate(prompts)
    assert got == wanted
    assert all(len(set(text[-NEW_TOKENS:])) > 10 for text in got)
    for request in range(len(PROMPTS)):
        engine.pool.free(request)
    assert engine.pool.num_free_blocks == engine.pool.num_blocks
