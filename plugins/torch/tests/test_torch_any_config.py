"""The defaults of the torch backends take every layer that they should, on every device."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from attn_select.layer.config import AttentionConfig, Phase
from attn_select.testing import check_answers
from attn_select.testing.strategies import configs
from attn_select.testing.toolkit import codes
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_mla_sparse import TORCH_MLA_SPARSE
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA

NOWHERE: dict[str, Any] = dict.fromkeys(["attention_chunk_size", "position_bias", "dual_chunk", "draft_tree"])
"""Features with conditions of their own, left out."""
GPUS = st.sampled_from([(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0)]) | st.none()


def expected(config: AttentionConfig, phase: Phase) -> set[str]:
    """Return the codes against what no backend of torch does, of any layer."""
    found = set()
    if config.decode_context_parallel_size > 1:
        if config.alibi or config.sliding_window is not None:
            found.add("decode-context-parallel-distance")
        if config.output_quantization == "fp4":  # of merged parts
            found.add("decode-context-parallel-output")
    if config.kv_cache_dtype == "nvfp4":  # which nothing can allocate, so that MLA's prefill refuses it too
        found.add("kv-cache-dtype")
    if config.output_quantization != "none":
        found.add("output-quantization")
    if config.cuda_graph == "ALWAYS" or (config.cuda_graph != "NEVER" and phase == "decode"):
        found.add("cuda-graph-level")
    return found


@given(config=configs(mla=False, **NOWHERE), where=GPUS)
def test_sdpa_takes_every_layer_without_mla(config: AttentionConfig, where: tuple[int, int] | None) -> None:
    for phase, outcome in check_answers(TORCH_SDPA, config, where).items():
        assert codes(outcome) <= expected(config, phase)


@given(config=configs(mla=True, sparse=False, **NOWHERE), where=GPUS)
def test_torch_mla_takes_every_dense_mla_layer(config: AttentionConfig, where: tuple[int, int] | None) -> None:
    for phase, outcome in check_answers(TORCH_MLA, config, where).items():
        assert codes(outcome) <= expected(config, phase)


@given(config=configs(mla=True, sparse=True, **NOWHERE), where=GPUS)
def test_the_sparse_backend_takes_sparse_mla(config: AttentionConfig, where: tuple[int, int] | None) -> None:
    for phase, outcome in check_answers(TORCH_MLA_SPARSE, config, where).items():
        wide = config.kv_cache_dtype == "fp8_ds_mla" and (config.kv_lora_rank, config.qk_rope_head_dim) != (512, 64)
        assert codes(outcome) <= expected(config, phase) | ({"head-size"} if wide else set())
