"""attn-select chooses in vLLM: its order, of which vLLM takes the first that it accepts."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_layers import HEAD, MLA_LAYERS, mine, serving, vllms

from attn_select import AttentionConfig, select
from attn_select.engines import own_choice
from attn_select.engines.own_choice import LEAST_GAIN
from attn_select.machine.device import lookup
from attn_select.testing.toolkit import GQA_FIELDS, MLA_FIELDS
from attn_select_vllm.choice import Choice, choose
from attn_select_vllm.log_block import choice_text, explicit_text, prefill_text
from attn_select_vllm.names import OWN_PREFIX, TABLE, EngineBackend, engine_backends

GOLDEN = json.loads((Path(__file__).with_name("vllm_answers_0_33_0.json")).read_text("utf-8"))
"""Made by ``python vllm_answers.py 8.0 9.0 10.0 12.0`` with vLLM 0.33.0; that file says how."""


def config_for(layer: dict[str, Any]) -> AttentionConfig:
    """The layer that a question of the golden file is about."""
    fields: dict[str, Any] = {
        "dtype": layer.get("dtype", "bfloat16"),
        "kv_cache_dtype": layer.get("kv_cache_dtype", "auto"),
        "block_size": layer.get("block_size"),
    }
    if layer.get("use_mla"):
        fields |= dict(MLA_FIELDS) | {"num_heads": 16, "sparse_top_k": 2048 if layer.get("use_sparse") else None}
        return AttentionConfig(**fields)
    fields |= {"num_heads": 32, "num_kv_heads": 8, "head_size": layer["head_size"]}
    fields |= {"attn_type": layer.get("attn_type", "decoder"), "sinks": layer.get("has_sink", False)}
    return AttentionConfig(**fields, sliding_window=128 if layer.get("has_sliding_window") else None)


CASES = [(gpu, layer) for gpu in GOLDEN["answers"] for layer in GOLDEN["layers"]]


@pytest.mark.parametrize(("gpu", "layer"), CASES)
def test_the_first_of_our_order_that_vllm_0_33_accepts(gpu: str, layer: str) -> None:
    answer = GOLDEN["answers"][gpu][layer]
    asked: list[str] = []

    def refusals(backend: str, engine: Any) -> list[str]:
        asked.append(engine.name)
        return ["kernels of attn-select are left out here"] if engine.own else answer["refused"].get(engine.name, ["-"])

    selection = select(config_for(GOLDEN["layers"][layer]), gpu)
    choice = choose(selection, refusals)
    accepted = [name for name, reasons in answer["refused"].items() if not reasons]
    if choice.engine is None:
        assert choice.backend is None
        assert not set(asked) & set(accepted)
    else:
        assert choice.engine.name in accepted
        assert [name for name in choice.refused if name in asked] == asked[: asked.index(choice.engine.name)]
        assert TABLE.names_of(choice.backend or "")[0] == choice.backend


def test_own_kernels_come_where_vllm_has_none_or_slower_ones() -> None:
    gqa, mla = AttentionConfig(**GQA_FIELDS), AttentionConfig(**MLA_FIELDS)
    fp8 = AttentionConfig(**GQA_FIELDS, kv_cache_dtype="fp8")
    hopper, blackwell, cpu = lookup("h100"), lookup("b200"), lookup("cpu")

    def names(backend: str, config: AttentionConfig, device: Any) -> list[str]:
        return [engine.name.replace(OWN_PREFIX, "own ") for engine in engine_backends(backend, config, device)]

    assert names("TORCH_SDPA", gqa, cpu) == ["own TORCH_SDPA", "CPU_ATTN"]
    assert names("FLEX_ATTENTION", gqa, cpu) == []  # vLLM on a CPU runs no other than CPU_ATTN
    assert names("TORCH_SDPA", gqa, hopper) == []
    assert names("TRITON_ATTN", gqa, hopper) == ["own TRITON_ATTN", "TRITON_ATTN"]
    assert names("TRITON_MLA", mla, blackwell) == ["own TRITON_MLA", "TRITON_MLA"]
    assert names("FLASHINFER_MLA", mla, hopper) == ["own FLASHINFER_MLA", "FLASHINFER_MLA"]
    assert names("FLASHINFER_MLA", mla, blackwell) == ["FLASHINFER_MLA"]
    assert names("FLASHINFER", gqa, hopper) == ["FLASHINFER"]
    assert names("FLASHINFER", fp8, hopper) == ["own FLASHINFER", "FLASHINFER"]
    assert names("FLASH_ATTN", gqa, hopper) == ["FLASH_ATTN"]


def test_the_log_says_what_runs_and_not_what_does_not() -> None:
    """Providers, buffers and CUDA-graph levels are those of attn-select's kernels, which vLLM's own are not."""
    selection = select(AttentionConfig(**GQA_FIELDS), "h100", times=False)
    theirs = choose(selection, lambda _, engine: ["-"] if engine.own else [])
    text = choice_text(theirs, "full_attention")
    assert "chose for full_attention: FLASH_ATTN (vLLM's kernel)" in text
    assert "prefill + decode FLASH_ATTN  FA3: " in text
    assert "Candidates for decode" in text
    for fact in ("kernel from", "CUDA graphs", "KV cache  "):
        assert fact not in text
    ours = choose(select(AttentionConfig(**GQA_FIELDS), "h100", backend="TRITON_ATTN"), lambda *_: [])
    assert "CUDA graphs ALWAYS" in choice_text(ours, "full_attention")


LLAMA_LAYERS = AttentionConfig(**GQA_FIELDS)
GEMMA_LAYERS = AttentionConfig(num_heads=16, num_kv_heads=8, head_size=256, logits_soft_cap=50.0)
WIDE_LAYERS = AttentionConfig(num_heads=64, num_kv_heads=8, head_size=256, logits_soft_cap=50.0)
PAIR = {"prefill": "FLASH_ATTN", "decode": "TRITON_ATTN"}


def chosen(selection: Any, own: str | None, accepted: Collection[str] | None = None, **options: Any) -> Choice:
    """What is taken where vLLM accepts these backends alone, or all that stand for one of attn-select's."""

    def refusals(_: str, engine: EngineBackend) -> list[str]:
        return [] if accepted is None or engine.name in accepted else ["-"]

    return choose(selection, refusals, None if own is None else vllms(own), **options)


@pytest.mark.parametrize(("gpu", "own"), [("cpu", "CPU_ATTN"), ("b200", "FLASH_ATTN")])
def test_vllms_own_choice_stays_where_nothing_was_timed(gpu: str, own: str) -> None:
    selection = serving(LLAMA_LAYERS, gpu)
    assert selection.evidence is None
    choice = chosen(selection, own)
    first = next(iter(choice.stays))
    assert (choice.engine, choice.leaves) == (vllms(own), True)
    assert first == engine_backends(selection.selected["decode"], selection.config, selection.device)[0].name != own
    assert choice.stays[first].gain is None
    head = choice_text(choice, "full_attention").splitlines()[0]
    assert head == f"{HEAD}leaves full_attention to vLLM's {own}: no times say that {first} is faster"


def test_times_of_one_percent_leave_vllms_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama's layers on an H200."""
    selection = serving(LLAMA_LAYERS, "h200")
    choice = chosen(selection, "FLASH_ATTN")
    assert (choice.backend, choice.engine) == ("TRITON_ATTN", EngineBackend("ATTN_SELECT_TRITON_ATTN", own=True))
    assert not choice.stays
    gain = predicted(selection, "FLASH_ATTN") / predicted(selection, "TRITON_ATTN")
    assert gain > LEAST_GAIN
    monkeypatch.setattr(own_choice, "LEAST_GAIN", gain)
    assert chosen(selection, "FLASH_ATTN").engine == choice.engine
    monkeypatch.setattr(own_choice, "LEAST_GAIN", gain + 1e-6)
    stays = chosen(selection, "FLASH_ATTN")
    assert (stays.engine, stays.stays["ATTN_SELECT_TRITON_ATTN"].gain) == (vllms("FLASH_ATTN"), gain)


def predicted(selection: Any, backend: str) -> float:
    time_us = own_choice.predicted_us(selection, dict.fromkeys(selection.config.phases, backend))
    assert time_us is not None
    return time_us


def test_vllms_own_choice_stays_below_one_percent() -> None:
    """A Gemma 2's layers with a window on an H100."""
    selection = serving(GEMMA_LAYERS.model_copy(update={"sliding_window": 4096}), "h100")
    assert selection.selected == dict.fromkeys(("prefill", "decode"), "TRITON_ATTN")
    choice = chosen(selection, "FLASH_ATTN")
    ours = "ATTN_SELECT_TRITON_ATTN"
    gain = choice.stays[ours].gain
    assert gain is not None
    assert 1 < gain < LEAST_GAIN
    assert (choice.engine, choice.refused) == (vllms("FLASH_ATTN"), {})
    head, second, *_ = choice_text(choice, "sliding_attention").splitlines()
    assert head == (
        f"{HEAD}leaves sliding_attention to vLLM's FLASH_ATTN: {ours} is predicted {gain:.3f} times as fast, "
        f"and {LEAST_GAIN} is the least"
    )
    assert second == "  no times say that TRITON_ATTN is faster"  # vLLM's kernel of that name was not timed


@pytest.mark.parametrize(("heads", "engine"), [(16, "ATTN_SELECT_TRITON_MLA"), (128, "FLASH_ATTN_MLA")])
def test_decodes_of_mla_are_weighed_as_what_they_are_of_a_step(heads: int, engine: str) -> None:
    """Of 128 heads prefills take most of a step, so that what decodes gain is lost in it."""
    layer = AttentionConfig(**{**MLA_FIELDS, "num_heads": heads, "cuda_graph": "UNIFORM_SINGLE_TOKEN_DECODE"})
    selection = serving(layer, "h200")
    choice = chosen(selection, "FLASH_ATTN_MLA")
    assert choice.engine is not None
    assert choice.engine.name == engine
    decodes = [own_choice.predicted_us(selection, {"decode": name}) or 0 for name in ("FLASH_ATTN_MLA", "TRITON_MLA")]
    assert decodes[0] > LEAST_GAIN * decodes[1]
    if heads == 128:
        kept = choice.stays["ATTN_SELECT_TRITON_MLA"]
        assert 1 < (kept.gain or 0) < kept.least


@pytest.mark.parametrize("stale", ["TRITON_ATTN", "FLASH_ATTN"])
def test_times_of_other_kernels_than_are_here_say_nothing(stale: str) -> None:
    selection = serving(LLAMA_LAYERS, "h200")
    used = replace(selection.evidence, stale={stale: "another release"})
    choice = chosen(replace(selection, evidence=used), "FLASH_ATTN")
    assert (choice.engine, choice.stays["ATTN_SELECT_TRITON_ATTN"].gain) == (vllms("FLASH_ATTN"), None)


def test_times_that_a_rule_keeps_out_say_nothing(tmp_path: Path) -> None:
    """FLASH_ATTN stands before FLASHINFER by rules, and takes less time on an H200."""
    accepted = ("FLASH_ATTN", "FLASHINFER")
    assert chosen(serving(LLAMA_LAYERS, "h200"), "FLASHINFER", accepted).engine == vllms("FLASH_ATTN")
    rules = mine("evidence = false", tmp_path)
    choice = chosen(serving(LLAMA_LAYERS, "h200", rules=rules), "FLASHINFER", accepted)
    assert (choice.engine, choice.stays["FLASH_ATTN"].gain) == (vllms("FLASHINFER"), None)


def test_what_comes_first_anyway_stays_without_a_word() -> None:
    choice = chosen(serving(WIDE_LAYERS, "h200"), "FLASH_ATTN")
    assert (choice.engine, choice.stays, choice.leaves) == (vllms("FLASH_ATTN"), {}, False)
    assert "chose for full_attention: FLASH_ATTN (vLLM's kernel)" in choice_text(choice, "full_attention")


@pytest.mark.parametrize(
    "rule",
    [
        'prefer = ["TRITON_ATTN"]',
        'prefer = ["TRITON_ATTN"]\nphase = "decode"',
        'priority = ["TRITON_ATTN", "FLASH_ATTN"]',
        'priority = ["TRITON_ATTN"]\nonly = true',
        'avoid = ["FLASH_ATTN"]',
        'deny = ["FLASH_ATTN"]',
    ],
)
def test_a_users_rule_leaves_vllms_own_choice(rule: str, tmp_path: Path) -> None:
    """The layers of a card that was not surveyed, where attn-select ranks FLASH_ATTN before TRITON_ATTN."""
    ours = ("ATTN_SELECT_TRITON_ATTN", "FLASH_ATTN")
    without = chosen(serving(LLAMA_LAYERS, "a100"), "FLASH_ATTN", ours)
    assert without.engine == vllms("FLASH_ATTN")
    choice = chosen(serving(LLAMA_LAYERS, "a100", rules=mine(rule, tmp_path)), "FLASH_ATTN", ours)
    assert choice.engine is not None
    assert (choice.engine.name, choice.stays) == ("ATTN_SELECT_TRITON_ATTN", {})


@pytest.mark.parametrize("rule", ['prefer = ["FLASH_ATTN"]', 'priority = ["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"]'])
def test_a_users_rule_keeps_vllms_own_choice(rule: str, tmp_path: Path) -> None:
    """A Llama's layers on an H200, where times speak against it."""
    accepted = ("ATTN_SELECT_TRITON_ATTN", "FLASH_ATTN")
    choice = chosen(serving(LLAMA_LAYERS, "h200", rules=mine(rule, tmp_path)), "FLASH_ATTN", accepted)
    assert choice.engine == vllms("FLASH_ATTN")


def test_a_name_leaves_vllms_own_choice() -> None:
    choice = chosen(serving(GEMMA_LAYERS, "h200", backend="TRITON_ATTN"), "FLASH_ATTN", ("TRITON_ATTN", "FLASH_ATTN"))
    assert choice.engine == vllms("TRITON_ATTN")


def test_times_of_our_kernel_choose_no_kernel_of_vllms(tmp_path: Path) -> None:
    selection = serving(LLAMA_LAYERS, "h200")
    choice = chosen(selection, "FLASH_ATTN", ("TRITON_ATTN", "FLASH_ATTN"))
    assert choice.engine == vllms("FLASH_ATTN")
    assert choice.stays["TRITON_ATTN"].gain is None
    assert "ATTN_SELECT_TRITON_ATTN" in choice.refused
    # Nor do they compare the two, or vLLM's with another backend.
    beside = chosen(selection, "TRITON_ATTN")
    assert (beside.engine, beside.stays["ATTN_SELECT_TRITON_ATTN"].gain) == (vllms("TRITON_ATTN"), None)
    wide = chosen(serving(WIDE_LAYERS, "h200"), "TRITON_ATTN")
    assert (wide.engine, wide.stays["FLASH_ATTN"].gain) == (vllms("TRITON_ATTN"), None)
    # A user who names it has attn-select's.
    rules = mine('prefer = ["TRITON_ATTN"]', tmp_path)
    asked = chosen(serving(LLAMA_LAYERS, "h200", rules=rules), "TRITON_ATTN")
    assert asked.engine == EngineBackend("ATTN_SELECT_TRITON_ATTN", own=True)


def test_layers_that_vllm_has_nothing_for_are_ours() -> None:
    choice = chosen(serving(LLAMA_LAYERS, "b200"), None, ("ATTN_SELECT_TRITON_ATTN",))
    assert choice.engine == EngineBackend("ATTN_SELECT_TRITON_ATTN", own=True)


def test_an_own_choice_that_attn_select_does_not_know_stays() -> None:
    choice = chosen(serving(LLAMA_LAYERS, "h200"), "elsewhere.Backend")
    assert (choice.engine, choice.leaves) == (None, True)
    assert choice_text(choice, "any").startswith(f"{HEAD}leaves any to vLLM's elsewhere.Backend: ")


def test_a_chosen_pair_runs_behind_one_backend() -> None:
    """By times: layers of 256 on an H200."""
    selection = serving(AttentionConfig(num_heads=16, num_kv_heads=8, head_size=256), "h200")
    assert selection.selected == PAIR
    paired = EngineBackend("ATTN_SELECT_FLASH_ATTN_TRITON_ATTN", own=True)
    choice = chosen(selection, "FLASH_ATTN")
    assert (choice.backend, choice.engine) == ("FLASH_ATTN_TRITON_ATTN", paired)
    text = choice_text(choice, "full_attention")
    assert f"FLASH_ATTN in prefills, TRITON_ATTN (attn-select's kernel, as {paired.name})" in text.splitlines()[0]
    assert ONE_OF_TWO not in text
    assert "CUDA graphs" in text
    little = serving(selection.config.model_copy(update={"num_heads": 40, "logits_soft_cap": 50.0}), "h200")
    assert little.selected == PAIR
    stays = chosen(little, "FLASH_ATTN")
    assert (stays.engine, (stays.stays[paired.name].gain or 2) < LEAST_GAIN) == (vllms("FLASH_ATTN"), True)


ONE_OF_TWO = "it runs in prefill and decode: the order in decode counts"


def test_the_log_says_which_of_a_pair_runs(tmp_path: Path) -> None:
    rules = mine('prefer = ["TRITON_ATTN"]\nphase = "decode"', tmp_path)
    selection = serving(GEMMA_LAYERS, "h200", rules=rules)
    choice = chosen(selection, "FLASH_ATTN", ("ATTN_SELECT_TRITON_ATTN", "FLASH_ATTN"))
    assert choice.backend == "TRITON_ATTN"
    assert ONE_OF_TWO in choice_text(choice, "full_attention")
    alike = chosen(select(MLA_LAYERS, "h200"), None)
    assert ONE_OF_TWO not in choice_text(alike, "mla")  # vLLM has a choice of its own for MLA's prefills
    named = explicit_text(OWN_PREFIX + "FLASH_ATTN_TRITON_ATTN", "full_attention")
    assert "(prefills by FLASH_ATTN, decodes by TRITON_ATTN)" in named


def test_mla_prefill_is_chosen_apart(tmp_path: Path) -> None:
    def prefill(selection: Any, own: str | None) -> Choice:
        return chosen(selection, own, argument="mla_prefill")

    untimed, timed = serving(MLA_LAYERS, "b200"), serving(MLA_LAYERS, "h100")
    assert untimed.selected["prefill"] == "FLASH_ATTN_MLA"
    assert prefill(untimed, None).engine == vllms("FLASH_ATTN")
    stays = prefill(untimed, "FLASHINFER")
    assert (stays.engine, stays.stays["FLASH_ATTN"].gain) == (vllms("FLASHINFER"), None)
    little = prefill(timed, "FLASH_ATTN")
    assert little.engine == vllms("FLASH_ATTN")
    assert 1 < (little.stays["FLASHINFER"].gain or 0) < LEAST_GAIN
    assert prefill_text(little).startswith(f"{HEAD}leaves mla prefill to vLLM's FLASH_ATTN: FLASHINFER is predicted ")
    for rule in ('prefer = ["FLASHINFER_MLA"]', 'deny = ["FLASH_ATTN_MLA"]'):
        rules = mine(f'{rule}\nphase = "prefill"', tmp_path)
        assert prefill(serving(MLA_LAYERS, "h100", rules=rules), "FLASH_ATTN").engine == vllms("FLASHINFER")
