"""The public functions, on the real facts."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import pickle
import random
from collections import UserDict, UserList
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from drawn_decisions import drawn_fields

import attn_select
from attn_select import (
    AttentionConfig,
    ConfigError,
    Environment,
    NoBackendError,
    Selection,
    clear_cache,
    configs_from_model,
    select,
    select_model,
)
from attn_select.decide import gate, selector
from attn_select.decide.decide import decide
from attn_select.decide.selector import environment_for
from attn_select.errors import UnknownNameError
from attn_select.layer.config import PHASES
from attn_select.machine import detection
from attn_select.machine.detection import Detection
from attn_select.machine.device import CPU, Device, lookup
from attn_select.rules.layers import RuleSet, load_rules
from attn_select.rules.rule import parse_rule

DENSE_MLA = {"num_heads": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
GQA = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128)


@pytest.mark.parametrize(("layer", "mla"), [(GQA, False), (AttentionConfig(**DENSE_MLA), True)], ids=["gqa", "mla"])
def test_backends_of_another_kind_of_layers_have_no_rank(layer: AttentionConfig, mla: bool) -> None:
    """A priority lists some backends of the layer's kind, and the others of this kind follow it, nothing else."""
    ranks = {c.backend: c.phases["prefill"].rank for c in select(layer, "h100").candidates}
    ranked = sorted(rank for rank in ranks.values() if rank is not None)
    assert ranked == list(range(1, len(ranked) + 1))
    of_kind = {name for name in ranks if ("MLA" in name) is mla and "SPARSE" not in name}
    assert {name for name, rank in ranks.items() if rank is not None} == of_kind


def test_a_backend_that_was_asked_for_leads_the_ranked_ones() -> None:
    by_rules = [candidate.backend for candidate in select(GQA, "a100").ranked(PHASES)]
    last = by_rules[-1]
    assert [candidate.backend for candidate in select(GQA, "a100", backend=last).ranked(PHASES)] == [
        last,
        *by_rules[:-1],
    ]
    halves = select(GQA, "a100", backend=f"decode={last}").ranked(PHASES)
    assert [candidate.backend for candidate in halves] == by_rules


def test_selections_are_cached_by_identity() -> None:
    first = select(GQA, "h100")
    assert select(GQA, "h100") is first
    assert select(GQA.model_copy(), "h100") == first
    assert select(GQA, "b200") is not first
    clear_cache()
    assert select(GQA, "h100") is not first
    assert select(GQA, "h100").selected == first.selected


def test_arguments_that_change_under_one_identity_are_read_again(tmp_path: Path) -> None:
    backend = ["TRITON_ATTN"]
    assert select(GQA, "h100", backend=backend).selected["decode"] == "TRITON_ATTN"
    backend[0] = "FLASHINFER"
    assert select(GQA, "h100", backend=backend).selected["decode"] == "FLASHINFER"


RULE = 'version = 1\n[[rules]]\nname = "first"\nprefer = ["{}"]\n'


def test_no_argument_that_changes_gives_a_stale_answer(tmp_path: Path) -> None:
    def chosen(**arguments: Any) -> str | None:
        return select(GQA, "h100", **arguments).selected["decode"]

    inner = {"decode": "TRITON_ATTN"}
    for backend in (UserDict(inner), MappingProxyType(inner), inner):
        inner["decode"] = "TRITON_ATTN"
        assert chosen(backend=backend) == "TRITON_ATTN"
        (backend if isinstance(backend, UserDict) else inner)["decode"] = "FLASHINFER"
        assert chosen(backend=backend) == "FLASHINFER"
    for name in ("TRITON_ATTN", "FLASHINFER"):
        (tmp_path / f"{name}.toml").write_text(RULE.format(name))
    for paths in (UserList([tmp_path / "TRITON_ATTN.toml"]), [tmp_path / "TRITON_ATTN.toml"]):
        assert chosen(rules=paths) == "TRITON_ATTN"
        paths[0] = tmp_path / "FLASHINFER.toml"
        assert chosen(rules=paths) == "FLASHINFER"
    names = UserList(["TRITON_ATTN"])
    assert chosen(backend=names) == "TRITON_ATTN"
    names[0] = "FLASHINFER"
    assert chosen(backend=names) == "FLASHINFER"


def test_a_rule_set_that_changes_is_read_again() -> None:
    rules = load_rules()
    assert select(GQA, "a100", rules).selected["decode"] == "FLASH_ATTN"
    rules.rules.append(parse_rule({"name": "no", "deny": ["FLASH_ATTN"]}, file="f", line=1, layer=9))
    assert select(GQA, "a100", rules).selected["decode"] == "FLASHINFER"


def test_options_of_a_rule_set_that_change_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text("version = 1\n[backends.FLASHINFER]\nuse_trtllm = false\n")
    rules = load_rules([file])
    assert select(GQA, "b200", rules).options["FLASHINFER"].use_trtllm is False  # type: ignore[attr-defined]
    rules.options["FLASHINFER"].values["use_trtllm"] = "auto"
    assert select(GQA, "b200", rules).options["FLASHINFER"].use_trtllm == "auto"  # type: ignore[attr-defined]


def test_environments_count_by_value() -> None:
    def ask(version: str, **more: str) -> Selection:
        environment = Environment(assume_installed=True, pins={"flashinfer-python": version}, **more)  # type: ignore[arg-type]
        return select(GQA, "h100", backend="FLASHINFER", environment=environment)

    old, new = ask("0.1.0"), ask("0.6.14")
    assert (old.ok, new.ok) == (False, True)
    assert ask("0.6.14") == new
    assert ask("0.6.14", cuda="13.0") != new


def alive(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


@pytest.mark.parametrize(
    ("backend", "fields", "kernel", "marked"),
    [
        ({"decode": "CUTLASS_MLA"}, {**DENSE_MLA, "block_size": 128}, "cutlass-mla", False),
        ("FLASHINFER", {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}, "trtllm-gen", False),
        ({"decode": "FLASHINFER_MLA"}, DENSE_MLA, "trtllm-gen", False),
        ({"decode": "FLASHINFER_MLA"}, {**DENSE_MLA, "block_size": 16}, "fa2", True),
    ],
)
def test_a_kernel_that_its_own_project_runs_on_such_a_gpu_is_not_marked(
    backend: Any, fields: dict[str, Any], kernel: str, marked: bool
) -> None:
    """As docs/decisions.md says; none of these ran on a GPU of 10.x here."""
    plan = select(AttentionConfig(**fields), "b200", backend=backend).plans["decode"]
    assert plan.kernel_name == kernel
    assert bool(plan.unverified) is marked


def drawn(count: int) -> list[AttentionConfig]:
    """Layers of every kind, each feature now and then."""
    random_, layers = random.Random(12), []
    while len(layers) < count:
        fields = drawn_fields(random_)
        if "head_size" in fields:
            fields["v_head_size"] = random_.choice([None, None, 64, fields["head_size"]])
        with contextlib.suppress(ConfigError):
            layers.append(AttentionConfig(**fields))
    return layers


@pytest.mark.parametrize("name", ["h100", "b200", "t4"])
def test_of_every_layer_all_is_said_that_the_gate_says_of_it_alone(name: str) -> None:
    """What a decider keeps of one layer is for those that it holds for: the gate, asked afresh, says the same."""
    layers, device = drawn(150), lookup(name)
    situation = selector.situation_for(device, None, None)
    options = select(GQA, device).options
    for config in [*layers, *layers[::-1]]:
        said = {candidate.backend: candidate.phases for candidate in decide(situation, config).candidates}
        assert set(said) == {*situation.candidates(config), *situation.absent}
        for backend, spec in situation.candidates(config).items():
            assert [*said[backend]] == [*config.phases]
            for phase, verdict in said[backend].items():
                judged = gate.check(spec, config, device, situation.environment, options[backend], phase)
                assert judged == (verdict.plan or [each for each in verdict.reasons if each.code != gate.DENIED])


def test_environments_of_many_gpus_are_bounded() -> None:
    clear_cache()
    before = alive(Environment)
    for sm_count in range(1, 401):
        select(GQA, Device("a GPU of many", (9, 0), sm_count=sm_count), RULES_OF_NOBODY)
    assert 0 < alive(Environment) - before <= 256  # one per decider, and those that were asked for last
    clear_cache()


RULES_OF_NOBODY = RuleSet()


def test_a_selection_holds_the_declared_variables_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of-the-user")
    monkeypatch.setenv("FORCE_NUM_KV_SPLITS", "2")
    clear_cache()
    selection = select(GQA, "h100")
    assert selection.environment.variables["FORCE_NUM_KV_SPLITS"] == "2"
    assert set(selection.environment.variables) <= {"FORCE_NUM_KV_SPLITS", "CC", "CXX", "PATH"}
    assert "of-the-user" not in repr(selection) + repr(selection.environment)
    assert b"of-the-user" not in pickle.dumps(selection)


MLA = AttentionConfig(num_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def test_what_a_cache_stores() -> None:
    sparse = MLA.model_copy(update={"sparse_top_k": 2048, "kv_cache_dtype": "fp8_ds_mla"})
    assert select(GQA, "h100").stored_dtype == "bfloat16"
    assert select(GQA.model_copy(update={"kv_cache_dtype": "fp8_e4m3"}), "h100").stored_dtype == "fp8_e4m3"
    assert select(sparse, "h100").stored_dtype == "fp8_ds_mla"
    assert select(GQA.model_copy(update={"attn_type": "encoder_only"}), "h100").stored_dtype is None


@pytest.mark.parametrize("gpu", ["t4", "h100", "b200", "rtx5090", "cpu"])
@pytest.mark.parametrize("config", [GQA, MLA, MLA.model_copy(update={"sparse_top_k": 2048})])
def test_a_selection_can_be_pickled_and_copied(config: AttentionConfig, gpu: str) -> None:
    selection = select(config, gpu)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        check_copy(pickle.loads(pickle.dumps(selection, protocol)), selection)
    check_copy(copy.copy(selection), selection)
    check_copy(copy.deepcopy(selection), selection)


def check_copy(found: Selection, selection: Selection) -> None:
    assert found.to_dict() == selection.to_dict()
    assert found.explain() == selection.explain()
    assert found.plans == selection.plans
    assert (found.device, found.environment, found.options) == (
        selection.device,
        selection.environment,
        selection.options,
    )
    assert all(found.backends[phase] is spec for phase, spec in selection.backends.items())


def load_in_worker(selection: Selection) -> tuple[int, list[str], Selection]:
    return os.getpid(), [backend.__name__ for backend in selection.load().values()], selection


def test_a_worker_loads_a_selection_and_sends_it_back() -> None:
    selection = select(GQA, CPU, backend="TORCH_SDPA")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pid, loaded, back = pool.submit(load_in_worker, selection).result()
    assert pid != os.getpid()
    assert loaded == [backend.__name__ for backend in selection.load().values()]
    check_copy(back, selection)


def test_a_foreign_gpu_does_not_get_this_machines_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_cache()
    h100 = lookup("h100")
    here = Detection(replace(h100, local=True), driver_version="580.1", cuda_driver_version="13.0")
    with monkeypatch.context() as patch:
        patch.setattr(detection, "detect_device", lambda: here)
        assert environment_for(here.device).cuda == "13.0"
        assert environment_for(h100).cuda is None
        assert environment_for(lookup("b200")).cuda is None
        assert environment_for(CPU).cuda is None
        assert environment_for(h100, {"cuda": "12.8"}).cuda == "12.8"
        assert environment_for(here.device, {"cuda": "12.8"}).cuda == "12.8"
    clear_cache()


@pytest.mark.parametrize("asked", [(), (None,), ("auto",)])
def test_a_gpu_that_is_found_later_is_decided_for(monkeypatch: pytest.MonkeyPatch, asked: tuple[Any, ...]) -> None:
    for device in (CPU, replace(lookup("h100"), local=True)):
        monkeypatch.setattr(detection, "detect_device", lambda: Detection(device))  # noqa: B023
        assert select(GQA, *asked).device == select_model([GQA], *asked)[0].device == device
    clear_cache()


def test_loading_what_cannot_run_raises_with_every_reason() -> None:
    selection = select(GQA, "t4", backend="FLASH_ATTN")
    assert not selection.ok
    with pytest.raises(NoBackendError, match=r"compute capability 7\.5") as caught:
        selection.load()
    assert caught.value.selection is selection


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_loading_imports_the_kernel_library_and_selecting_does_not() -> None:
    selection = select(GQA, "h100", backend="FLASHINFER")
    with pytest.raises(ImportError, match="flashinfer cannot be imported"):
        selection.load()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (({"num_heads": 4}, "h100"), ConfigError, "expected an AttentionConfig"),
        ((GQA, 5), ConfigError, "device = 5"),
        ((GQA, "h1000"), UnknownNameError, "h100"),
        ((GQA, "h100", None, 5), ConfigError, "backend = 5"),
        ((GQA, "h100", None, "FLASHATTN"), UnknownNameError, "FLASH_ATTN"),
        ((GQA, "h100", None, {"decode": 5}), ConfigError, "backend = {'decode': 5}: expected NAME"),
        ((GQA, "h100", 5), ConfigError, "rules = 5: expected the path of a rules file"),
        ((GQA, "h100", [5]), ConfigError, r"rules = \[5\]: expected the path of a rules file"),
    ],
)
def test_wrong_arguments_are_documented_errors(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        select(*arguments)


def test_an_environment_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment = {}: expected an Environment, or None"):
        select(GQA, "h100", environment={})  # type: ignore[arg-type]


@pytest.mark.parametrize("configs", [GQA, configs_from_model("llama-3-8b"), [GQA, {}], None])
def test_a_model_is_a_sequence_of_configs(configs: Any) -> None:
    with pytest.raises(ConfigError, match=r"configs = .*: expected a sequence of AttentionConfig and StateConfig"):
        select_model(configs, "h100")


def test_a_model_may_come_from_a_generator() -> None:
    kinds = [GQA, GQA.model_copy(update={"sliding_window": 128})]
    assert select_model((kind for kind in kinds), "h100") == select_model(kinds, "h100")  # type: ignore[arg-type]


def test_auto_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    clear_cache()
    assert select(GQA, "auto").device == select(GQA).device
    assert select(GQA).device.is_cpu


@pytest.mark.parametrize("gpu", ["a100", "l40s", "h100", "b200", "rtx5090"])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_kinds_of_one_pool_agree_on_layout_and_block_size(gpu: str, cache: str) -> None:
    fields: dict[str, Any] = {"num_heads": 20, "num_kv_heads": 20, "head_size": 64, "kv_cache_dtype": cache}
    kinds = [{}, {"attn_type": "encoder_decoder"}, {"sliding_window": 128}, {"sinks": True}]
    selections = select_model([AttentionConfig(**fields, **kind) for kind in kinds], gpu)
    if all(selection.ok for selection in selections):
        assert len({(s.kv_layout, s.block_size) for s in selections}) == 1


def test_every_public_name_can_be_had() -> None:
    for name in attn_select.__all__:
        assert getattr(attn_select, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = attn_select.no_such_name  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("gpu", "changes", "backends"),
    [
        ("l40s", {}, ("FLASH_ATTN", "FLASHINFER")),
        ("rtx4090", {}, ("FLASH_ATTN", "FLASHINFER")),
        ("rtx4090", {"sliding_window": 1024}, ("FLASH_ATTN", "FLASH_ATTN")),  # no such times behind the rule
        ("l40s", {"num_speculative_tokens": 3}, ("FLASH_ATTN", "FLASH_ATTN")),
        ("l40s", {"sinks": True}, ("TRITON_ATTN", "TRITON_ATTN")),
        ("a100", {}, ("FLASH_ATTN", "FLASH_ATTN")),
        ("rtx5090", {}, ("FLASH_ATTN", "FLASH_ATTN")),
    ],
    ids=str,
)
def test_decodes_on_ada_run_on_flashinfer(gpu: str, changes: dict[str, Any], backends: tuple[str, str]) -> None:
    selection = select(GQA.model_copy(update=changes), gpu)
    assert tuple(spec.name for spec in selection.backends.values() if spec is not None) == backends
