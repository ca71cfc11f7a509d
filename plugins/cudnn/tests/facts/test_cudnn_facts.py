"""What the golden file does not show: sources, what compiles together, the place among others."""

from __future__ import annotations

from attn_select import select
from attn_select.testing import check_sources, gqa_layer
from attn_select_cudnn.facts.cudnn_attn import BLOCK_SIZES, CUDNN_ATTN


def test_every_fact_names_its_source() -> None:
    check_sources(CUDNN_ATTN)


def test_layers_compile_together_by_what_the_kernels_are_made_for() -> None:
    keys = {CUDNN_ATTN.compile_key(gqa_layer(head_size=size)) for size in (40, 64, 80, 128, 160, 256)}
    assert len(keys) == 3
    sizes = [CUDNN_ATTN.compile_key(gqa_layer(block_size=size)) for size in (None, 16, 48, 24, 20, 3)]
    assert [key[2] for key in sizes] == [16, 16, 16, 8, 4, 1]  # type: ignore[index]
    assert set(BLOCK_SIZES) >= {key[2] for key in sizes}  # type: ignore[index]


def test_it_is_ranked_behind_the_kernels_that_are_as_fast_or_faster() -> None:
    for gpu in ("a100", "h100", "b200"):
        order = [candidate.backend for candidate in select(gqa_layer(), gpu).candidates]
        assert order.index("TRITON_ATTN") < order.index("CUDNN_ATTN") < order.index("TORCH_SDPA")
