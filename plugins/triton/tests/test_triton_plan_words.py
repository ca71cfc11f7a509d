"""What a plan says in words decides nothing: with other words, also with those of another kernel, the same runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

import torch

from attn_select.backends.spec import BackendPlan, BackendSpec, Reason
from attn_select.layer.config import AttentionConfig
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BlockTable,
    Capacity,
    MLAAttention,
    attention_group,
    prepare_batch,
)
from attn_select.testing import same_bits, selection_of
from attn_select_triton.facts.paged_attention import PAGED_ATTENTION
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA
from attn_select_triton.runtime import paged_attention, schedule

PLAIN = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float16"}
LATENT = {
    "num_heads": 3, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "dtype": "float16",
}  # fmt: skip
QUERY_LENS, SEQ_LENS = [1, 1, 20], [70, 5, 40]


def group_of(spec: BackendSpec, fields: Mapping[str, Any], options: Mapping[str, int], path: str | None) -> Any:
    """Return a group of plans for an H100 in Triton's interpreter, or on this GPU; ``path`` takes the words' place."""

    def plan(*asked: Any) -> BackendPlan | list[Reason]:
        found = spec.plan(*asked)
        if path is None or not isinstance(found, BackendPlan):
            return found
        return replace(found, path=path, because=path, notes=(path,))

    selection = selection_of(replace(spec, plan=plan), AttentionConfig(**fields), "h100", options=options)
    return attention_group(selection, "cuda" if torch.cuda.is_available() else "cpu", Capacity(4, 256, 512))


def step(group: AttentionGroup) -> tuple[list[Any], torch.Tensor]:
    """Return what a step of mixed requests launches, and what its layer gives."""
    torch.manual_seed(0)
    config, dtype, size = group.config, torch.float16, group.block_size or 1
    width = -(-max(SEQ_LENS) // size)
    table = BlockTable(len(SEQ_LENS), width, size, group.device)
    for request, seq_len in enumerate(SEQ_LENS):
        table.set_row(request, [request * width + block for block in range(-(-seq_len // size))])
    cache = group.allocate_kv_cache(len(SEQ_LENS) * width)
    cache.copy_(torch.randn(cache.shape))
    metadata, tokens = group.build(prepare_batch(QUERY_LENS, SEQ_LENS, table)), sum(QUERY_LENS)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(group.device, dtype)

    if config.mla:
        layer = MLAAttention(group, drawn(config.num_heads * 64, 32))
        output = layer(drawn(tokens, config.num_heads, 48), drawn(tokens, 32), drawn(tokens, 16), cache, metadata)
    else:
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        output = Attention(group)(*(drawn(tokens, heads, config.head_size) for heads in sizes), cache, metadata)
    return [part.metadata for part in metadata.parts], output


@pytest.mark.parametrize(
    ("spec", "fields", "options", "gathers", "other_path"),
    [
        (TRITON_ATTN, PLAIN, {}, True, "prefill"),
        (TRITON_ATTN, PLAIN, {"gather_workspace_mib": 0}, False, "prefill, pages gathered"),
        (TRITON_ATTN, {**PLAIN, "block_size": 64}, {}, False, "warp-specialised prefill"),
        (TRITON_MLA, LATENT, {}, False, "Gluon decode"),
        (PAGED_ATTENTION, PLAIN, {"gather_workspace_mib": 1}, True, "prefill"),
    ],
    ids=["gathered", "by pointers", "by TMA", "MLA", "classic"],
)
def test_words_decide_nothing(
    spec: BackendSpec,
    fields: dict[str, Any],
    options: dict[str, int],
    gathers: bool,
    other_path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule, "prefill_way", lambda ways, *_, **__: "gathered" if "gathered" in ways else "pages")
    monkeypatch.setattr(paged_attention, "COPY_ROWS", 0)
    _, wanted = step(group_of(spec, fields, options, None))
    for path in (other_path, "nonsense"):
        (planned, *_), found = step(group_of(spec, fields, options, path))
        assert same_bits(found, wanted)
        launches = getattr(planned, "parts", getattr(planned, "prefills", []))
        assert any(launch.gather is not None for launch in launches) == gathers
