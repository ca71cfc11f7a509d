"""Which backend, or pair of backends, is chosen, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest

from attn_select.backends import distributions
from attn_select.backends.registry import Plugin
from attn_select.backends.spec import BackendPlan
from attn_select.decide.explicit import Choice, parse_choice
from attn_select.decide.outcome import Candidate
from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError, UnknownNameError
from attn_select.layer.config import AttentionConfig


def candidate(selection: Selection, name: str) -> Candidate:
    return next(c for c in selection.candidates if c.backend == name)


def codes(selection: Selection, name: str, phase: str = "decode") -> list[str]:
    return [reason.code for reason in candidate(selection, name).phases[phase].reasons]  # type: ignore[index]


def priority(*names: str, **more: Any) -> dict[str, Any]:
    return {"name": "order-" + "-".join(names) + str(more.get("phase", "")), "priority": list(names), **more}


def test_the_first_valid_backend_in_order_serves_both_phases(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    specs = [make_spec("A", head_sizes=_sizes(64)), make_spec("B"), make_spec("C")]
    selection = make_decider(specs, [priority("A", "C", "B")]).decide(gqa, Choice())
    assert selection.selected == {"prefill": "C", "decode": "C"}
    assert codes(selection, "A") == ["head-size"]
    assert [c.backend for c in selection.candidates][:3] == ["A", "C", "B"]
    assert candidate(selection, "B").phases["decode"].verdict == "valid"
    assert [candidate(selection, n).phases["decode"].rank for n in "ACB"] == [1, 2, 3]


def test_a_backend_that_no_rule_ranks_is_never_chosen(make_spec: Any, make_decider: Any, gqa: AttentionConfig) -> None:
    selection = make_decider(
        [make_spec("A", head_sizes=_sizes(64)), make_spec("B")], [{**priority("A"), "only": True}]
    ).decide(gqa, Choice())
    assert selection.selected == {"prefill": None, "decode": None}
    assert not selection.ok
    assert candidate(selection, "B").phases["decode"].verdict == "valid"
    assert candidate(selection, "B").phases["decode"].rank is None


def test_without_a_priority_rule_the_registered_order_counts_and_a_warning_says_so(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    selection = make_decider([make_spec("B"), make_spec("A")]).decide(gqa, Choice())
    assert selection.selected["decode"] == "B"
    assert any("no priority rule matches this layer in decode" in w for w in selection.warnings)


def test_a_decode_only_backend_pairs_with_the_best_compatible_prefill(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    specs = [make_spec("D", phases=["decode"], layouts=["MLA"]), make_spec("P"), make_spec("Q", layouts=["MLA"])]
    rules = [priority("D", phase="decode"), priority("P", "Q", phase="prefill")]
    selection = make_decider(specs, rules).decide(gqa, Choice())
    assert selection.selected == {"prefill": "Q", "decode": "D"}
    assert selection.kv_layout == "MLA"
    assert codes(selection, "D", "prefill") == ["phase-not-served"]


def test_without_a_phase_rule_one_backend_for_all_phases_beats_a_better_ranked_pair(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    specs = [make_spec("D", phases=["decode"]), make_spec("B")]
    assert make_decider(specs, [priority("D", "B")]).decide(gqa, Choice()).selected == {"prefill": "B", "decode": "B"}
    by_phase = [priority("D", "B", phase="decode"), priority("B", phase="prefill")]
    assert make_decider(specs, by_phase).decide(gqa, Choice()).selected == {"prefill": "B", "decode": "D"}


def test_no_common_layout_is_said_and_nothing_is_chosen(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    specs = [
        make_spec("D", phases=["decode"], layouts=["FLASHINFER_NHD"]),
        make_spec("P", phases=["prefill"], layouts=["FLASHINFER_HND"]),
    ]
    selection = make_decider(specs, [priority("D", "P")]).decide(gqa, Choice())
    assert selection.selected == {"prefill": None, "decode": None}
    assert any("no pair of backends shares a KV layout and block size" in w for w in selection.warnings)


@pytest.mark.parametrize(
    ("decode", "prefill", "asked", "expected"),
    [
        ((64,), (16,), None, 64),
        ((16,), (64,), None, 64),
        ((48,), (32,), None, 96),
        ((64,), (16,), 128, 128),
        ((128, 16), (32, 16), None, 128),
    ],
)
def test_the_block_size_is_one_that_both_kernels_can_split(
    make_spec: Any,
    make_decider: Any,
    decode: tuple[int, ...],
    prefill: tuple[int, ...],
    asked: int | None,
    expected: int,
) -> None:
    specs = [make_spec("D", phases=["decode"], blocks=decode), make_spec("P", phases=["prefill"], blocks=prefill)]
    config = AttentionConfig(num_heads=8, head_size=64, block_size=asked)
    assert make_decider(specs, [priority("D", "P")]).decide(config, Choice()).block_size == expected


def test_dense_mla_prefill_does_not_bind_the_cache(make_spec: Any, make_decider: Any, mla: AttentionConfig) -> None:
    config = mla.model_copy(update={"block_size": 64, "kv_cache_dtype": "fp8_e4m3"})
    decode = make_spec(
        "D", phases=["decode"], layouts=["MLA"], blocks=[64], mla=True, kv_cache_dtypes=("bfloat16", "fp8_e4m3")
    )
    prefill = make_spec("P", phases=["prefill"], layouts=[], blocks=[], mla=True, reads_cache=False)
    selection = make_decider([decode, prefill], [priority("D", "P")]).decide(config, Choice())
    assert selection.selected == {"prefill": "P", "decode": "D"}
    assert (selection.kv_layout, selection.block_size) == ("MLA", 64)
    assert selection.cache_shape == ["num_blocks", 64, 576]
    assert selection.bytes_per_token == 576


def test_deny_rejects_whatever_prefers_and_names_the_rule(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    rules = [priority("A", "B"), {"name": "no", "deny": ["A"], "because": "broken"}, {"name": "yes", "prefer": ["A"]}]
    selection = make_decider([make_spec("A"), make_spec("B")], rules).decide(gqa, Choice())
    assert selection.selected["decode"] == "B"
    reason = candidate(selection, "A").phases["decode"].reasons[0]
    assert reason.code == "denied-by-rule"
    assert "'no' (rules.toml:2): broken" in reason.message


def test_an_explicit_choice_beats_every_rule_and_says_so(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    rules = [priority("A", "B"), {"name": "no", "deny": ["B"]}]
    selection = make_decider([make_spec("A"), make_spec("B")], rules).decide(gqa, Choice(default="B"))
    assert selection.selected == {"prefill": "B", "decode": "B"}
    assert any("although rule 'no' (rules.toml:2) denies it" in w for w in selection.warnings)


def test_an_explicit_choice_that_fails_the_gate_is_never_replaced(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    decider = make_decider([make_spec("A"), make_spec("B", head_sizes=_sizes(64))], [priority("A", "B")])
    selection = decider.decide(gqa, Choice(default="B"))
    assert selection.selected == {"prefill": None, "decode": None}
    assert candidate(selection, "A").phases["decode"].verdict == "valid"
    assert decider.decide(gqa, Choice(decode="B")).selected == {"prefill": "A", "decode": None}


def test_an_explicit_choice_applies_to_the_phases_that_the_backend_serves(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    decider = make_decider([make_spec("A"), make_spec("D", phases=["decode"])], [priority("A")])
    assert decider.decide(gqa, Choice(default="D")).selected == {"prefill": "A", "decode": "D"}
    assert decider.decide(gqa, Choice(decode="D")).selected == {"prefill": "A", "decode": "D"}
    assert decider.decide(gqa, Choice(default="A", decode="D")).selected == {"prefill": "A", "decode": "D"}
    assert decider.decide(gqa, Choice(prefill="D")).selected == {"prefill": None, "decode": "A"}


def test_known_backends_without_a_plugin_are_candidates(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    selection = make_decider([make_spec("A")], [priority("TRITON_ATTN", "A")]).decide(gqa, Choice())
    assert codes(selection, "TRITON_ATTN") == ["plugin-not-installed"]
    assert candidate(selection, "TRITON_ATTN").phases["decode"].reasons[0].remedy == distributions.install_command(
        "attn-select-triton"
    )
    assert candidate(selection, "TRITON_ATTN").phases["decode"].rank == 1
    assert selection.selected["decode"] == "A"


def test_a_known_backend_of_a_broken_plugin_says_what_is_broken(
    make_spec: Any, make_decider: Any, gqa: AttentionConfig
) -> None:
    broken = Plugin("triton", "attn-select-triton", "1.0", error="ImportError: no libcuda")
    decider = make_decider([make_spec("A")], [priority("TRITON_ATTN", "A")], failed=[broken])
    selection = decider.decide(gqa, Choice(default="TRITON_ATTN"))
    (reason,) = candidate(selection, "TRITON_ATTN").phases["decode"].reasons
    assert reason.code == "plugin-broken"
    assert reason.message == "plugin triton (attn-select-triton 1.0) is broken: ImportError: no libcuda"
    assert reason.remedy is None
    assert codes(selection, "TORCH_SDPA") == ["plugin-not-installed"]


def test_an_unverified_plan_is_valid_marked_and_ranked_last_unless_a_user_says_otherwise(
    make_spec: Any, make_decider: Any
) -> None:
    config = AttentionConfig(num_heads=8, head_size=64, output_quantization="fp4")
    specs = [
        make_spec("A", output_quantizations=("fp4",)),
        make_spec("B", output_quantizations=("fp4",), plan=_returns_unverified),
    ]
    selection = make_decider(specs).decide(config, Choice())
    assert selection.selected["decode"] == "A"  # both are unverified, so the order stands
    for name, count in (("A", 1), ("B", 2)):
        plan = candidate(selection, name).phases["decode"].plan
        assert plan is not None
        assert len(plan.unverified) == count
    document = selection.to_dict()
    assert "never executed" in document["plan"]["phases"]["decode"]["unverified"][0]
    assert document["candidates"][1]["phases"]["decode"]["unverified"][0] == "never run on an H100"
    assert "unverified: never run on an H100" in selection.explain()

    config = AttentionConfig(num_heads=8, head_size=64)
    decider = make_decider([make_spec("B", plan=_returns_unverified), make_spec("A")])
    selection = decider.decide(config, Choice())
    assert selection.selected["decode"] == "A"
    assert [c.backend for c in selection.candidates][:2] == ["A", "B"]
    assert candidate(selection, "B").phases["decode"].rank == 2
    assert decider.decide(config, Choice(default="B")).selected["decode"] == "B"
    users = make_decider(specs, [priority("B", "A")])
    assert users.decide(config, Choice()).selected["decode"] == "B"


def _returns_unverified(config: AttentionConfig, *_: Any) -> BackendPlan:
    return BackendPlan(
        path="path",
        because="only one",
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=("FLASH_ATTN_NHD",),
        kernel_block_sizes=(16,),
        cuda_graph="ALWAYS",
        unverified=("never run on an H100",),
    )


KNOWN = ("FLASH_ATTN", "FLASHMLA")


@pytest.mark.parametrize(
    ("written", "choice"),
    [
        (None, Choice()),
        ("FLASHMLA", Choice(default="FLASHMLA")),
        ("flash-attn", Choice(default="FLASH_ATTN")),
        ("decode=FLASHMLA", Choice(decode="FLASHMLA")),
        (["decode=FLASHMLA", "FLASH_ATTN"], Choice(default="FLASH_ATTN", decode="FLASHMLA")),
        ({"prefill": "FLASH_ATTN"}, Choice(prefill="FLASH_ATTN")),
    ],
)
def test_an_explicit_choice_is_written_in_several_ways(written: Any, choice: Choice) -> None:
    assert parse_choice(written, KNOWN) == choice


@pytest.mark.parametrize("written", ["=FLASHMLA", "decode=", "=", 5, ["FLASHMLA", None]])
def test_a_malformed_choice_is_refused(written: Any) -> None:
    with pytest.raises(ConfigError, match="expected NAME or PHASE=NAME"):
        parse_choice(written, KNOWN)


def test_unknown_backends_and_phases_name_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="FLASH_ATTN"):
        parse_choice("FLASH_ATTEN", KNOWN)
    with pytest.raises(UnknownNameError) as caught:
        parse_choice("TW", KNOWN, [Plugin("tw", "tw-kernels", "1.0", error="ImportError: no libcuda")])
    assert caught.value.message == (
        "unknown backend 'TW'; it may be a backend of a plugin that did not load: "
        "plugin tw (tw-kernels 1.0) is broken: ImportError: no libcuda"
    )
    with pytest.raises(UnknownNameError, match="unknown phase 'decod'"):
        parse_choice("decod=FLASHMLA", KNOWN)
    with pytest.raises(ConfigError, match="given twice"):
        parse_choice(["FLASHMLA", "FLASH_ATTN"], KNOWN)


def _sizes(*values: int) -> Any:
    from attn_select.backends.spec import HeadSizes

    return HeadSizes(values=values)
