"""A model whose last layers own no cache: row by row as ``configs_from_model`` says it, on a CPU."""

from __future__ import annotations

import torch

from attn_select import configs_from_model, select_model
from attn_select.runtime import Attention, BlockTable, Capacity, attention_group, num_blocks_for, prepare_batch

CONFIG = {
    "model_type": "gemma3n_text",
    "hidden_size": 64,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "num_kv_shared_layers": 5,
}
TOKENS = 12


def test_layers_without_a_cache_read_the_one_that_the_model_names() -> None:
    found = configs_from_model(CONFIG, overrides={"dtype": "float32"})
    selections = select_model(found.configs, "cpu")
    per_layer = [
        s.bytes_per_token for k, s in zip(found.kinds, selections, strict=True) for _ in range(k.owners.caches)
    ]
    block_size = selections[0].block_size
    assert block_size is not None
    # 5 of 10 layers own a cache: half the bytes of a model that shares nothing, so twice the blocks.
    budget = 10 * 2 * 2 * 16 * 4 * block_size  # bytes of one block in all ten layers
    assert num_blocks_for(budget, [b or 0 for b in per_layer], block_size) == 2

    capacity = Capacity(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64)
    groups = [attention_group(selection, "cpu", capacity) for selection in selections]
    table = BlockTable(1, 4, block_size, "cpu")
    table.append_row(0, list(range(-(-TOKENS // block_size))))
    batch = prepare_batch([TOKENS], [TOKENS], table)
    metadata = [group.build(batch) for group in groups]
    kind_of = {layer: index for index, kind in enumerate(found.kinds) for layer in kind.layers}
    sources = {layer: source for kind in found.kinds for layer, source in kind.owners.kv_sources.items()}
    assert sources == {5: 3, 6: 3, 7: 3, 8: 3, 9: 4}

    torch.manual_seed(0)
    layers: list[Attention] = []
    caches: dict[int, torch.Tensor] = {}
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for layer in sorted(kind_of):
        index = kind_of[layer]
        source, group = sources.get(layer), groups[index]
        layers.append(Attention(group, kv_sharing_target=None if source is None else layers[source]))
        query, key, value = (torch.randn(TOKENS, heads, 16) for heads in (4, 2, 2))
        if source is None:
            caches[layer], stored[layer] = group.allocate_kv_cache(4), (key, value)
            layers[layer](query, key, value, caches[layer], metadata[index])
            continue
        read = layers[layer](query, None, None, caches[source], metadata[index])
        own = Attention(group)(query, *stored[source], group.allocate_kv_cache(4), metadata[index])
        assert torch.equal(read, own)
    assert sorted(caches) == [0, 1, 2, 3, 4]
