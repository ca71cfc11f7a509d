"""The configurations that the conformance suite draws."""

from __future__ import annotations

from dataclasses import replace

from conformance_variants import HEADS, Variant

from attn_select.backends.spec import Fact
from attn_select.decide import gate
from attn_select.layer.config import AttentionConfig
from attn_select.layer.features import FEATURES
from attn_select.machine.device import Device
from attn_select.testing.conformance_configs import config_text, draw_case


def test_configurations_come_from_the_seed_and_can_be_pasted(right: Variant) -> None:
    drawn = [draw_case(right.spec, 3, index, HEADS) for index in range(60)]
    assert drawn == [draw_case(right.spec, 3, index, HEADS) for index in range(60)]
    assert drawn != [draw_case(right.spec, 4, index, HEADS) for index in range(60)]
    for case in drawn:
        assert eval(config_text(case.config), {"AttentionConfig": AttentionConfig}) == case.config
    assert sum(case.changed is not None for case in drawn) == 24
    changed = {draw_case(right.spec, 3, index, HEADS).changed for index in range(3000)} - {None}
    assert changed == {
        *("head_size", "v_head_size", "kv_lora_rank", "dtype", "kv_cache_dtype", "block_size", "attn_type", "alibi"),
        *("logits_soft_cap", "mm_prefix", "non_causal", "output_quantization", "decode_context_parallel_size"),
        *("position_bias", "dual_chunk", "draft_tree"),
    }


NOT_YES_OR_NO = ("output_quantizations", "speculative_tokens")


def test_what_is_drawn_from_inside_is_refused_by_no_capability(right: Variant) -> None:
    """Some features exclude each other: chunks, windows and ALiBi are not measured across ranks."""
    facts = {feature.fact: Fact(True, "a test") for feature in FEATURES if feature.fact not in NOT_YES_OR_NO}
    able = {phase: replace(served, **facts) for phase, served in right.spec.capabilities.items()}
    for index in range(0, 1000, 5):
        case = draw_case(replace(right.spec, capabilities=able), 3, index, HEADS)
        reasons = gate.capability_reasons(able[case.phase], case.config, Device("h100", (9, 0)), ())
        found = {reason.code for reason in reasons}
        assert found <= {"compute-capability"}, config_text(case.config)
