"""The test toolkit: its answers are the gate's, and each of its checks finds what it is there to find."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given

from attn_select.backends.spec import (
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Library,
    Reason,
)
from attn_select.decide.gate import check
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import CPU, lookup
from attn_select.machine.environment import Environment
from attn_select.reference.running import check_result, problem_for, result_of, run_problem, shared_prefix
from attn_select.runtime import Capacity, attention_group, ops
from attn_select.testing import (
    ask,
    check_answers,
    check_sources,
    codes_of,
    environment_of,
    error_bound,
    gqa_layer,
    mla_layer,
    plan_of,
    reasons_of,
    relative_error,
    selection_of,
    strategies,
    with_other_texts,
)

SOURCE = "this test's own word"
FA2 = Library("flash-attn", "flash_attn", "pip install flash-attn", ">=2.8")
PLAN = BackendPlan(
    path="plain",
    because="there is only one",
    query_dtype="bfloat16",
    returns_lse=True,
    kv_layouts=("FLASH_ATTN_NHD", "FLASHINFER_NHD"),
    kernel_block_sizes=(16,),
    cuda_graph="ALWAYS",
)


def spec_of(outcome: Any = PLAN, **changes: Any) -> BackendSpec:
    served = Capabilities(
        compute_capabilities=Fact(ComputeCapabilities((((8, 0), (9, 9)),), cpu=True), SOURCE),
        dtypes=Fact(("bfloat16",), SOURCE),
        kv_cache_dtypes=Fact(("bfloat16",), SOURCE),
        head_sizes=Fact(HeadSizes(), SOURCE),
        block_sizes=Fact((16,), SOURCE),
    )
    fields: dict[str, Any] = {
        "summary": "made for this test",
        "capabilities": {"prefill": served, "decode": served},
        "plan": lambda *_: outcome,
        "load": "nowhere:Nothing",
        **changes,
    }
    return BackendSpec(name="PLAIN", **fields)


def test_answers_are_the_gates() -> None:
    spec, config = spec_of(), gqa_layer(alibi=True, sinks=True)
    assert plan_of(spec, gqa_layer()) == PLAN
    assert list(reasons_of(spec, config)) == ["alibi", "sinks"] == sorted(codes_of(spec, config))
    gate_says = check(spec, config, lookup("h100"), Environment(assume_installed=True), spec.options(), "decode")
    assert ask(spec, config) == gate_says
    assert codes_of(spec, gqa_layer(), (7, 5)) == {"compute-capability"}
    assert codes_of(spec, gqa_layer(), None) == set()
    assert "mla-unsupported" in reasons_of(spec, mla_layer())


def test_plan_of_fails_with_every_reason() -> None:
    with pytest.raises(AssertionError, match=r"PLAIN rejects the layer: alibi: .*; sinks: "):
        plan_of(spec_of(), gqa_layer(alibi=True, sinks=True))
    with pytest.raises(AssertionError, match="PLAIN accepts the layer: BackendPlan"):
        reasons_of(spec_of(), gqa_layer())
    twice = [Reason("again", "once"), Reason("again", "twice")]
    with pytest.raises(AssertionError, match="two reasons with the same code: again: once; again: twice"):
        reasons_of(spec_of(twice), gqa_layer())


def test_environments_of_stated_libraries() -> None:
    assert environment_of().state(FA2) == "assumed"
    assert environment_of(missing=[FA2]).state(FA2) == "missing"
    assert environment_of(pins={"Flash_Attn": "2.7"}).state(FA2) == "wrong-version"
    here = environment_of(installed={"Flash_Attn": "2.8.3"})
    assert (here.state(FA2), here.version("flash-attn"), here.version("torch")) == ("installed", "2.8.3", None)
    assert environment_of(installed={"torch": "2.11"}).state(FA2) == "missing"
    assert environment_of(installed={"flash-attn": None}).state(FA2) == "wrong-version"
    assert environment_of(installed={}, pins={"flash-attn": "2.9"}).state(FA2) == "installed"
    assert dict(environment_of(variables={"A": "1"}).variables) == {"A": "1"}
    assert dict(environment_of().variables) == {}
    assert len({here, environment_of(installed={"flash-attn": "2.8.3"}), environment_of(installed={})}) == 2
    assert len({environment_of(), environment_of(missing=[FA2]), environment_of(missing=[FA2])}) == 2
    with pytest.raises(TypeError, match="environment and missing: give one or the other"):
        ask(spec_of(), gqa_layer(), environment=environment_of(), missing=[FA2])
    needs = spec_of(libraries=[[FA2]])
    assert list(reasons_of(needs, gqa_layer(), missing=[FA2])) == ["library-missing"]


@given(config=strategies.configs(), where=strategies.capabilities(), environment=strategies.environments([FA2]))
def test_a_sound_plan_function_answers_all_that_is_drawn(
    config: AttentionConfig, where: Any, environment: Environment
) -> None:
    answers = check_answers(spec_of(libraries=[[FA2]]), config, where, environment=environment)
    assert set(answers) == set(config.phases)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        ([], "a plan or at least one reason"),
        ([Reason("Not_Kebab", "text")], "no stated reason"),
        ([Reason("silent", "")], "no stated reason"),
        (replace(PLAN, path=""), r"path = \'\' \(accepted: a name\)"),
        (replace(PLAN, because=""), "why it is this path"),
        (replace(PLAN, kv_layouts=("ELSEWHERE",)), "ELSEWHERE"),
        (replace(PLAN, kernel_block_sizes=()), "kernel_block_sizes"),
        (replace(PLAN, workspace_bytes=-1), "workspace_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_of_the_wrong_form_are_found(outcome: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_answers(spec_of(outcome), gqa_layer(), "h100")


@dataclass
class Kernel:
    """Facts of a plugin's own."""

    head_size: Fact[int]


def test_a_fact_without_a_source_is_found() -> None:
    check_sources(spec_of(), Kernel(Fact(128, SOURCE)), least=11)
    with pytest.raises(AssertionError, match=r"PLAIN: Kernel.head_size = 128 has the source 'vLLM'"):
        check_sources(spec_of(), Kernel(Fact(128, "vLLM")))
    capabilities = replace(spec_of().capabilities["decode"], alibi=Fact(True, "default"))
    with pytest.raises(AssertionError, match="is not the default, but gives it as its source"):
        check_sources(spec_of(capabilities={"decode": capabilities}))
    with pytest.raises(AssertionError, match="1000 were expected"):
        check_sources(spec_of(), least=1000)


def test_other_texts_leave_all_else_as_it_is() -> None:
    plan = replace(PLAN, kernel=("acme", 2), notes=("a note",), provider="acme (acme.ops)")
    other = with_other_texts(plan)
    texts = {"path": plan.path, "because": plan.because, "notes": plan.notes, "provider": plan.provider}
    assert all(getattr(other, name) != text for name, text in texts.items())
    assert replace(other, **texts) == plan


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch, root: Any) -> Iterator[BackendSpec]:
    """The documented example plugin."""
    monkeypatch.syspath_prepend(str(root / "examples" / "acme_attention"))
    yield importlib.import_module("acme_attention").ACME_ATTN
    for name in ("acme_attention", "acme_runtime"):
        sys.modules.pop(name, None)


def test_a_step_runs_on_poisoned_memory_and_is_compared(acme: BackendSpec) -> None:
    selection = selection_of(acme, gqa_layer(num_heads=4, num_kv_heads=2, head_size=64), CPU)
    group = attention_group(selection, "cpu", Capacity(8, 256, 256))
    problem = problem_for(group, [(1, 40), (17, 40), (3, 70)], seed=3)
    result = run_problem(group, problem)
    check_result(group, problem, result)
    assert result.lse is not None
    assert result.output.shape == problem.query.shape
    result.output[1] *= 2
    with pytest.raises(AssertionError, match=r"request 1 \(query of 17, 40 keys\), token 0"):
        check_result(group, problem, result)
    shared = shared_prefix(problem, 1)
    assert shared.block_table is not None
    assert len(set(shared.block_table[:, 0].tolist())) == 1


def test_an_fp8_output_that_saturates_is_compared_with_what_it_can_hold(acme: BackendSpec) -> None:
    declared = {
        phase: replace(known, output_quantizations=Fact(("fp8",), SOURCE)) for phase, known in acme.capabilities.items()
    }
    config = gqa_layer(num_heads=4, num_kv_heads=2, head_size=64, output_quantization="fp8")
    selection = selection_of(replace(acme, capabilities=declared), config, CPU)
    group = attention_group(selection, "cpu", Capacity(8, 256, 256))
    problem = problem_for(group, [(1, 40), (17, 40), (3, 70)], seed=3)
    exact, scale = problem.reference()[0], torch.tensor(0.0002)
    assert (exact.abs() > 448 * scale).float().mean() > 0.05
    rounded = ops.quantize_fp8(exact.float(), scale, torch.float8_e4m3fn)
    result = result_of(group, problem, rounded, None, None, scale)
    assert relative_error(result.output, exact).norm > error_bound(config, selection.plans).norm
    check_result(group, problem, result)
    overflown = rounded.float().masked_fill(exact.abs() > 448 * scale, torch.nan)
    for wrong, message in ((-rounded.float(), "output is off by"), (overflown, "holds NaN or infinity")):
        stored = wrong.to(torch.float8_e4m3fn)
        with pytest.raises(AssertionError, match=message):
            check_result(group, problem, result_of(group, problem, stored, None, None, scale))


def test_one_wrong_row_among_many_right_ones_is_found(acme: BackendSpec) -> None:
    selection = selection_of(acme, gqa_layer(num_heads=4, num_kv_heads=2, head_size=64), CPU)
    group = attention_group(selection, "cpu", Capacity(8, 256, 256))
    problem = problem_for(group, [(64, 64)] * 4, seed=3)
    result = run_problem(group, problem)
    check_result(group, problem, result)
    reference, bound = problem.reference()[0], error_bound(group.config, selection.plans)
    size = reference[100, 1].norm()
    typical = reference.square().sum(dim=-1).mean().sqrt()
    result.output[100, 1] *= 1 + 2 * bound.row * max(1.0, float(typical / size))
    assert relative_error(result.output, reference).norm < bound.norm
    with pytest.raises(AssertionError, match=r"worst in request 1 \(query of 64, 64 keys\), token 36"):
        check_result(group, problem, result)
