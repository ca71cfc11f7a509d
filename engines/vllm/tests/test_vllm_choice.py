"""attn-select chooses in vLLM: its order, of which vLLM takes the first that it accepts."""

from __future__ import annotations

import json
import pickle
import sys
from collections import namedtuple
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_emulated import LLAMA, AttentionSelectorConfig, engine_config

from attn_select import AttentionConfig, __version__, clear_cache, select
from attn_select.backends import registry
from attn_select.backends.registry import load_plugins
from attn_select.engines import own_choice
from attn_select.engines.own_choice import LEAST_GAIN, SERVING
from attn_select.errors import AttnSelectError, ConfigError, RulesError, RuntimeMissingError
from attn_select.machine.device import lookup
from attn_select.testing.toolkit import GQA_FIELDS, MLA_FIELDS
from attn_select_vllm.choice import Choice, choose
from attn_select_vllm.log_block import choice_text, explicit_text, prefill_text
from attn_select_vllm.names import OWN_KERNELS, OWN_PREFIX, TABLE, EngineBackend, engine_backends

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


HEAD = f"attn-select {__version__} "
LLAMA_LAYERS, MLA_LAYERS = AttentionConfig(**GQA_FIELDS), AttentionConfig(**MLA_FIELDS)
GEMMA_LAYERS = AttentionConfig(num_heads=16, num_kv_heads=8, head_size=256, logits_soft_cap=50.0)
PAIR = {"prefill": "FLASH_ATTN", "decode": "TRITON_ATTN"}


def vllms(name: str) -> EngineBackend:
    return EngineBackend(name, own=False)


def chosen(selection: Any, own: str | None, accepted: Collection[str] | None = None, **options: Any) -> Choice:
    """What is taken where vLLM accepts these backends alone, or all that stand for one of attn-select's."""

    def refusals(_: str, engine: EngineBackend) -> list[str]:
        return [] if accepted is None or engine.name in accepted else ["-"]

    return choose(selection, refusals, None if own is None else vllms(own), **options)


def serving(config: AttentionConfig, gpu: str, **options: Any) -> Any:
    return select(config, gpu, **{"workload": SERVING, **options})


def mine(text: str, folder: Path) -> Path:
    """A user's file of one rule."""
    (folder / "mine.toml").write_text(f'version = 1\n[[rules]]\nname = "mine"\n{text}\n')
    return folder / "mine.toml"


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
    """A Gemma 2's layers on an H200."""
    choice = chosen(serving(GEMMA_LAYERS, "h200"), "FLASH_ATTN")
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
    gemma = chosen(serving(GEMMA_LAYERS, "h200"), "TRITON_ATTN")
    assert (gemma.engine, gemma.stays["FLASH_ATTN"].gain) == (vllms("TRITON_ATTN"), None)
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
    little = serving(selection.config.model_copy(update={"sliding_window": 4096}), "h200", workload="1024q1s2k,8q4k")
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


ASKED = AttentionSelectorConfig(head_size=32, dtype="torch.float32", kv_cache_dtype="auto", block_size=None)


def rules_file(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine read a rule."""
    (folder / "r.toml").write_text(f'version = 1\n[[rules]]\nname = "mine"\n{text}\n')
    monkeypatch.setenv("ATTN_SELECT_RULES", str(folder / "r.toml"))
    clear_cache()


@pytest.fixture
def prefers_our_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules_file('prefer = ["TORCH_SDPA"]', tmp_path, monkeypatch)


asked_for = pytest.mark.usefixtures("prefers_our_kernel")
"""Tests of what runs where a user asks for attn-select's kernels: on a CPU vLLM's own choice stays otherwise."""


def started(vllm: Any, config: Any = None, version: str = "0.32.0") -> Any:
    """The emulated engine with the plugin."""
    engine = vllm(config or engine_config(LLAMA), version)
    from attn_select_vllm.plugin import register

    register()
    return engine


@asked_for
def test_the_entry_point_wraps_the_platform(vllm: Any) -> None:
    engine = vllm(engine_config(LLAMA))
    from attn_select_vllm.plugin import register

    register()
    register()
    assert {name for name in engine.registry.__members__ if name.startswith(OWN_PREFIX)} == {
        OWN_PREFIX + name for name in OWN_KERNELS
    }
    path = engine.platform.get_attn_backend_cls(None, attn_selector_config=ASKED, num_heads=None)
    assert path == OWN_KERNELS["TORCH_SDPA"]
    assert engine.platform.get_attn_backend_cls(None, attn_selector_config=ASKED) == path
    (block,) = engine.log.lines
    assert "chose for full_attention: TORCH_SDPA (attn-select's kernel, as ATTN_SELECT_TORCH_SDPA)" in block
    assert "4 query heads, 2 KV heads, head size 32, float32" in block
    assert "TRITON_ATTN" in block
    assert "selector_rules.toml:" in block


def test_vllms_own_choice_stays_on_a_cpu(vllm: Any) -> None:
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    assert engine.log.lines[0].startswith(f"{HEAD}leaves full_attention to vLLM's CPU_ATTN: ")


@pytest.mark.parametrize("error", [ValueError("No valid attention backend found"), NotImplementedError("on CPU")])
def test_what_vllm_has_no_backend_for_is_ours(error: Exception, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("vllm_emulated.Platform.get_attn_backend_cls", has_none)
    assert started(vllm).platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]


def test_a_pair_is_asked_for_both_of_its_kernels(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm)
    from attn_select_vllm.hook import judge

    engine.platform.device_name = "cuda"
    selection = serving(AttentionConfig(num_heads=16, num_kv_heads=8, head_size=256), "h200")
    judged = (selection, engine.platform, ASKED, engine.config, vllms("FLASH_ATTN"))
    pair = "ATTN_SELECT_FLASH_ATTN_TRITON_ATTN"
    assert judge(*judged).engine == EngineBackend(pair, own=True)

    def missing(_: Any) -> None:
        raise RuntimeMissingError("no kernels")

    monkeypatch.setattr(type(load_plugins().specs["FLASH_ATTN"]), "get_class", missing)
    assert judge(*judged).engine == vllms("FLASH_ATTN")
    assert pair in judge(*judged).refused


@pytest.mark.parametrize("rule", ["", 'prefer = ["FLASHINFER_MLA"]'])
def test_vllms_own_choice_of_mla_prefill_stays(vllm: Any, rule: str, tmp_path: Path) -> None:
    engine = started(vllm)
    from attn_select_vllm.mla_prefill import choose_prefill

    selection = serving(MLA_LAYERS, "h100", **({"rules": mine(rule, tmp_path)} if rule else {}))
    choice = choose_prefill(selection, engine.platform, engine.config)
    asked = engine.config.attention_config.mla_prefill_backend
    assert choice.own == vllms("FLASH_ATTN")
    assert (choice.engine, asked and asked.name) == (
        (vllms("FLASHINFER"), "FLASHINFER") if rule else (choice.own, None)
    )


RELEASES_OF_EACH_REGISTRY = ("0.26.0", "0.32.0")
"""Until 0.26 vLLM's registry overrides backends and makes none; later ones make members of their own."""


@pytest.mark.parametrize("version", RELEASES_OF_EACH_REGISTRY)
def test_own_kernels_can_be_asked_for_by_name(vllm: Any, version: str) -> None:
    engine = started(vllm, version=version)
    for name, path in OWN_KERNELS.items():
        found = engine.registry[OWN_PREFIX + name]  # what a string on the command line goes through
        assert isinstance(found, engine.registry)
        assert (found.name, found.get_path()) == (OWN_PREFIX + name, path)
        asked = ASKED._replace(use_mla="MLA" in name)
        assert engine.platform.get_attn_backend_cls(found, asked) == path


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", [*OWN_KERNELS])
def test_a_name_for_the_wrong_kind_of_layers_is_an_error(vllm: Any, name: str, sparse: bool) -> None:
    """Before, its class was made with the other kind's arguments: a TypeError."""
    engine = started(vllm)
    asked = ASKED._replace(use_mla=sparse or "MLA" not in name, use_sparse=sparse)

    with pytest.raises(ConfigError) as failed:
        engine.platform.get_attn_backend_cls(engine.registry[OWN_PREFIX + name], asked)
    assert failed.value.fields == ("attention_backend",)
    served = "dense MLA" if "MLA" in name else "layers with keys and values per head"
    assert f"it serves {served} alone" in failed.value.message


@pytest.mark.parametrize("version", RELEASES_OF_EACH_REGISTRY)
def test_a_name_reaches_a_process_that_has_loaded_no_plugin(vllm: Any, version: str) -> None:
    first = started(vllm, version=version)
    sent = pickle.dumps(first.registry["ATTN_SELECT_TRITON_ATTN"])
    for name in [name for name in sys.modules if name.startswith("attn_select_vllm")]:
        del sys.modules[name]
    second = vllm(engine_config(LLAMA), version)
    assert "ATTN_SELECT_TRITON_ATTN" not in second.registry.__members__
    assert pickle.loads(sent) is second.registry["ATTN_SELECT_TRITON_ATTN"]


def test_ranks_have_their_share_of_the_heads(vllm: Any) -> None:
    engine = started(vllm, engine_config(LLAMA, tensor_parallel=2))
    engine.platform.get_attn_backend_cls(None, ASKED)
    assert "2 query heads, 1 KV head," in engine.log.lines[0]


def test_an_explicit_backend_wins(vllm: Any) -> None:
    engine = started(vllm)
    chosen = engine.registry["CPU_ATTN"]
    assert engine.platform.get_attn_backend_cls(chosen, ASKED) == "vllm.CPU_ATTN"
    # Gemma 4 and ``attention_config`` name one too: nothing says who did.
    assert "to CPU_ATTN: --attention-backend, attention_config or the model asks for it" in engine.log.lines[0]
    own = engine.registry["ATTN_SELECT_TRITON_ATTN"]
    assert engine.platform.get_attn_backend_cls(own, ASKED) == OWN_KERNELS["TRITON_ATTN"]


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"use_mm_prefix": True}, "passes no image ranges"),
    ({"use_kv_connector": True}, "serves no KV connector"),
    ({"use_non_causal": True}, "passes no non-causal batches"),
    ({"use_per_head_quant_scales": True, "use_mla": True}, "passes no scales per head with MLA"),
    ({"attn_type": "encoder_decoder"}, "serves decoder layers alone"),
]


@asked_for
def test_encoders_run_our_kernels(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm, engine_config({**LLAMA, "model_type": "bert"}))
    asked = ASKED._replace(attn_type="encoder_only")
    assert engine.platform.get_attn_backend_cls(None, asked) == "vllm.CPU_ATTN"
    of_release_0_32(monkeypatch)
    assert engine.platform.get_attn_backend_cls(None, asked) == OWN_KERNELS["TORCH_SDPA"]


@pytest.mark.parametrize(("asked", "reason"), LIMITS)
def test_an_explicit_own_backend_is_held_to_the_limits(vllm: Any, asked: dict[str, Any], reason: str) -> None:
    engine = started(vllm)
    name = "ATTN_SELECT_TRITON_MLA" if asked.get("use_mla") else "ATTN_SELECT_TORCH_SDPA"
    with pytest.raises(ConfigError, match=f"--attention-backend {name}: .*{reason}"):
        engine.platform.get_attn_backend_cls(engine.registry[name], ASKED._replace(**asked))


@asked_for
def test_an_engine_that_speculates_after_one_that_does_not(vllm: Any) -> None:
    """vLLM keeps choices by what its selector is asked, which says nothing of speculation."""
    engine = started(vllm)
    from vllm.v1.attention import selector

    assert selector._cached_get_attn_backend(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]
    engine.config.speculative_config = Speculation
    assert selector._cached_get_attn_backend(None, ASKED) == "vllm.CPU_ATTN"


@pytest.mark.parametrize(
    ("name", "capability", "says"),
    [("cuda", (9, 0), "it runs on cuda 9.0, and attn-select sees CPU"), ("rocm", (9, 4), "it runs on rocm, and")],
)
def test_a_device_that_attn_select_does_not_see_is_vllms(
    vllm: Any, name: str, capability: tuple[int, int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container without NVML, and ROCm, whose capabilities are no CUDA's."""
    monkeypatch.setattr("attn_select.machine.detection.load_nvml", no_nvml)
    clear_cache()
    engine = started(vllm)
    engine.platform.device_name, type(engine.platform).capability = name, capability
    for _ in range(2):
        assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    (line,) = engine.log.lines
    assert line.startswith("WARNING attn-select-vllm takes no part in vLLM 0.32.0, which chooses attention by itself: ")
    assert says in line


def no_nvml() -> Any:
    raise OSError("no NVML")


@pytest.mark.parametrize("broken", ["rules", "workload"])
def test_settings_that_cannot_be_read_do_not_end_the_engine(
    vllm: Any, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "rules":
        rules_file('prefers = ["FLASH_ATTN"]', tmp_path, monkeypatch)
    else:
        monkeypatch.setenv("ATTN_SELECT_WORKLOAD", "chatt")
        clear_cache()
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    (line,) = engine.log.lines
    assert ("r.toml:" if broken == "rules" else "chatt") in line
    assert "ATTN_SELECT_STRICT=1" in line
    monkeypatch.setenv("ATTN_SELECT_STRICT", "1")
    with pytest.raises(AttnSelectError):
        engine.platform.get_attn_backend_cls(None, ASKED)


def test_the_working_directorys_rules_are_not_an_engines(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = tmp_path / "selector_rules.toml"
    rules.write_text('version = 1\n[[rules]]\nname = "sdpa"\nprefer = ["TORCH_SDPA"]\n')
    monkeypatch.chdir(tmp_path)
    clear_cache()
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    monkeypatch.setenv("ATTN_SELECT_RULES", str(rules))
    clear_cache()
    assert engine.platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]


def of_release_0_32(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backend import AttentionBackend

    monkeypatch.setattr(AttentionBackend, "supported_kv_cache_layouts", lambda: None, raising=False)


def test_cross_attention_runs_our_kernels_from_0_32(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm, engine_config({**LLAMA, "model_type": "whisper"}))
    from attn_select_vllm.kernels.limits import limits

    asked = ASKED._replace(attn_type="encoder_decoder")
    assert limits(asked, engine.config) == ["the adapter serves decoder layers alone"]
    of_release_0_32(monkeypatch)
    assert limits(asked, engine.config) == []


@asked_for
def test_images_are_passed_on_from_0_32(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm)
    of_release_0_32(monkeypatch)
    from attn_select_vllm.kernels.limits import limits

    asked = ASKED._replace(use_mm_prefix=True)
    assert engine.platform.get_attn_backend_cls(None, asked) == OWN_KERNELS["TORCH_SDPA"]
    clamped = engine_config({**LLAMA, "model_type": "gemma4_text"})
    assert limits(asked, clamped) == ["the windows of this model end its images too, and the kernels' windows do not"]


def test_connectors_read_caches_of_vllms_own_shape(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(vllm)
    of_release_0_32(monkeypatch)
    from attn_select_vllm.kernels.limits import limits

    asked = ASKED._replace(use_kv_connector=True)
    engine.platform.device_name = "cuda"
    assert limits(asked, engine.config) == limits(asked._replace(use_mla=True), engine.config) == []
    shared = SimpleNamespace(
        **vars(engine.config) | {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}
    )
    without = asked._replace(use_kv_connector=False)
    for asked in (without, without._replace(use_mla=True)):
        assert limits(asked, shared) == []
    reason = "the adapter serves decode context parallelism with MLA, or of decoders without drafts and halved batches"
    assert limits(without._replace(attn_type="encoder_decoder"), shared) == [reason]
    shared.parallel_config.use_ubatching = True
    assert limits(without, shared) == [reason]
    assert limits(without._replace(use_mla=True), shared) == []
    shared.parallel_config.use_ubatching, shared.speculative_config = False, SimpleNamespace()
    assert limits(without, shared) == [reason]
    assert limits(without._replace(use_mla=True), shared) == []


@asked_for
def test_no_store_is_shared_with_vllms_own_backends_for_cpus(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """These pack what they write: before, an engine with attn-select read other numbers there, without a word."""
    engine = started(vllm)
    of_release_0_32(monkeypatch)
    asked = ASKED._replace(use_kv_connector=True)
    assert engine.platform.get_attn_backend_cls(None, asked) == "vllm.CPU_ATTN"
    with pytest.raises(ConfigError, match="pack what they write"):
        engine.platform.get_attn_backend_cls(engine.registry["ATTN_SELECT_TORCH_SDPA"], asked)


def test_a_backend_that_vllm_does_not_have_is_named(vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules_file('prefer = ["FLEX_ATTENTION", "TORCH_SDPA"]', tmp_path, monkeypatch)
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]
    assert "  FLEX_ATTENTION is not taken: vLLM has no backend that stands for it" in engine.log.lines[0]


def test_a_rule_of_a_backend_that_nobody_knows_is_warned_of(
    vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules_file('prefer = ["TORCH_SPDA"]', tmp_path, monkeypatch)
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    (warning,) = [line for line in engine.log.lines if line.startswith("WARNING")]
    assert "TORCH_SPDA" in warning
    assert "TORCH_SDPA" in warning
    monkeypatch.setenv("ATTN_SELECT_STRICT", "1")
    with pytest.raises(RulesError):
        engine.platform.get_attn_backend_cls(None, ASKED)


def test_what_to_install_where_no_plugin_serves_the_device(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the plugin of Triton on a CPU."""
    found = registry.entry_points

    def of_triton(group: str) -> Any:
        names, *rest = found(group)
        return [entry for entry in names if entry.name == "triton"], *rest

    monkeypatch.setattr(registry, "entry_points", of_triton)
    clear_cache()
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    assert "  TORCH_SDPA would run: pip install " in engine.log.lines[0]


@asked_for
@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("use_adaptive_verification", "the adapter plans from query lengths on the host"),
        ("use_rswa", "the adapter passes no windows beside references"),
        ("use_what_comes_next", "the adapter does not know use_what_comes_next"),
    ],
)
def test_flags_of_later_releases_are_refused(vllm: Any, flag: str, reason: str) -> None:
    engine = started(vllm)
    from attn_select_vllm.kernels.limits import limits

    later = namedtuple("Later", [*ASKED._fields, flag])
    assert engine.platform.get_attn_backend_cls(None, later(*ASKED, True)) == "vllm.CPU_ATTN"
    assert limits(later(*ASKED, True), engine.config) == [reason]
    assert engine.platform.get_attn_backend_cls(None, later(*ASKED, False)) == OWN_KERNELS["TORCH_SDPA"]


class Speculation:
    num_speculative_tokens = 2
    method = "dflash"


class ByNGrams(Speculation):
    method = "ngram"


class ByEagle(Speculation):
    method = "eagle"


@asked_for
@pytest.mark.parametrize("speculation", [ByNGrams, ByEagle])
def test_uniform_drafts_run_our_kernels(
    vllm: Any, speculation: type[Speculation], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(vllm, engine_config(LLAMA, speculative_config=speculation))
    of_release_0_32(monkeypatch)
    assert engine.platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]


@pytest.mark.parametrize(("second_runner", "most"), [(False, 5), (True, 3)])
def test_drafts_at_once_lengthen_decodes(vllm: Any, second_runner: bool, most: int) -> None:
    """vLLM's first runner appends them to the drafts that are verified."""

    class AtOnce(ByEagle):
        parallel_drafting = True
        draft_model_config = None

    vllm(config := engine_config(LLAMA, speculative_config=AtOnce, use_v2_model_runner=second_runner))
    from attn_select_vllm.layers import layer_config

    assert layer_config(ASKED, config, None).max_decode_query_len == most


def test_a_drafters_layers_are_read_in_its_own_config(vllm: Any) -> None:
    drafter = engine_config({**LLAMA, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}).model_config

    class ByModel(Speculation):
        draft_model_config = drafter

    vllm(config := engine_config(LLAMA, speculative_config=ByModel))
    from attn_select_vllm.layers import layer_config

    own, drafting = (layer_config(ASKED._replace(head_size=size), config, None) for size in (32, 64))
    assert (own.num_heads, own.num_kv_heads, own.head_size) == (4, 2, 32)
    assert (drafting.num_heads, drafting.num_kv_heads, drafting.head_size) == (2, 1, 64)


def test_ahead_of_a_gpu_kernels_count_the_keys_on_the_device(vllm: Any) -> None:
    engine = vllm(config := engine_config(LLAMA, speculative_config=ByNGrams))
    engine.platform.device_name = "cuda"
    from attn_select_vllm.kernels.limits import speculation_limits

    assert speculation_limits(config, "TRITON_ATTN") == speculation_limits(config, "TRITON_MLA") == []
    assert speculation_limits(config, "TORCH_SDPA") == [
        "speculation leaves the host with bounds of the lengths, and TORCH_SDPA plans from exact ones"
    ]


@asked_for
def test_what_the_adapter_does_not_do_is_vllms(vllm: Any) -> None:
    engine = started(vllm)
    assert engine.platform.get_attn_backend_cls(None, ASKED._replace(use_mm_prefix=True)) == "vllm.CPU_ATTN"
    assert "ATTN_SELECT_TORCH_SDPA is not taken: the adapter passes no image ranges" in engine.log.lines[0]


def test_drafts_that_were_not_run_are_vllms(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm(config := engine_config(LLAMA, speculative_config=ByEagle))
    from attn_select_vllm.kernels.limits import speculation_limits

    assert speculation_limits(config, "TRITON_ATTN") == [
        "the adapter was run with drafts by ngram, suffix alone, not by eagle"
    ]
    of_release_0_32(monkeypatch)
    assert speculation_limits(config, "TRITON_ATTN") == []
    config.speculative_config = Speculation
    (said,) = speculation_limits(config, "TRITON_ATTN")
    assert said.endswith("draft_model, eagle, eagle3, mtp alone, not by dflash")


def test_layers_that_attn_select_does_not_know_are_vllms(vllm: Any) -> None:
    engine = started(vllm)
    asked = ASKED._replace(kv_cache_dtype="int8_per_token_head")
    assert engine.platform.get_attn_backend_cls(None, asked) == "vllm.CPU_ATTN"
    assert "leaves full_attention to vLLM: kv_cache_dtype = 'int8_per_token_head'" in engine.log.lines[0]


@asked_for
def test_an_unlisted_release_runs_without_us(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm(engine_config(LLAMA), "0.99.0")
    from attn_select_vllm.plugin import register

    register()
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    (line,) = engine.log.lines
    assert line.startswith("WARNING attn-select-vllm takes no part in vLLM 0.99.0")
    monkeypatch.setenv("ATTN_SELECT_ANY_VERSION", "1")
    register()
    assert engine.platform.get_attn_backend_cls(None, ASKED) == OWN_KERNELS["TORCH_SDPA"]


@pytest.mark.parametrize("error", [AttributeError, TypeError, KeyError])
def test_an_interface_that_moved_ends_in_vllms_choice(vllm: Any, error: type[Exception]) -> None:
    engine = started(vllm)

    def moved(_: Any) -> int:
        raise error("it has moved")

    engine.config.model_config.get_num_kv_heads = moved
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    assert (
        "takes no part in vLLM 0.32.0, which chooses attention by itself: an interface has moved"
        in (engine.log.lines[0])
    )


def test_workers_leave_the_release_to_the_first_process(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "the engine's first process")
    engine = vllm(engine_config(LLAMA), "0.99.0")
    from attn_select_vllm.plugin import register

    register()
    assert engine.log.lines == []
    monkeypatch.setenv("ATTN_SELECT_ANY_VERSION", "1")
    register()
    del engine.config.model_config.get_num_kv_heads
    assert engine.platform.get_attn_backend_cls(None, ASKED) == "vllm.CPU_ATTN"
    assert "an interface has moved" in engine.log.lines[0]


def test_a_platform_without_the_method_is_left_alone(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = vllm(engine_config(LLAMA))
    import vllm_emulated

    monkeypatch.delattr(vllm_emulated.Platform, "get_attn_backend_cls")
    from attn_select_vllm.plugin import register

    register()
    assert "an interface has moved (AttributeError" in engine.log.lines[0]
