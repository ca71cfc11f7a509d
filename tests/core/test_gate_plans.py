"""``plan()`` as the gate asks it: when, what its answer may be, and what the gate makes of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gate_cases import (
    ASSUMED,
    H100,
    MLA,
    PLAIN,
    SPARSE,
    WIDE_HEADS,
    MakeCapabilities,
    MakePlan,
    MakeSpec,
    check,
    reasons,
)

from attn_select.backends.spec import BackendOptions, BackendPlan, Reason
from attn_select.decide import gate
from attn_select.layer.config import CUDA_GRAPH_LEVELS, AttentionConfig, Phase
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment


def test_plan_is_asked_even_when_a_capability_speaks_against(spec: MakeSpec) -> None:
    backend = spec(plan=lambda *_: [Reason("special", "no luck", 1, 2)])
    assert [reason.code for reason in reasons(backend, PLAIN)] == ["special"]
    assert [reason.code for reason in reasons(backend, {**PLAIN, "sinks": True})] == ["sinks", "special"]


def test_plan_is_not_asked_about_another_kind_of_attention(spec: MakeSpec, capabilities: MakeCapabilities) -> None:
    asked: list[Phase] = []

    def plan(
        config: AttentionConfig, device: Device, environment: Environment, options: Any, phase: Phase
    ) -> list[Reason]:
        asked.append(phase)
        return [Reason("special", "no luck")]

    backend = spec(plan=plan, capabilities={"decode": capabilities(mla=True, **WIDE_HEADS)})
    assert [reason.code for reason in reasons(backend, PLAIN)] == ["mla-only"]
    assert [reason.code for reason in reasons(backend, SPARSE)] == ["sparse-unsupported"]
    assert [reason.code for reason in reasons(backend, MLA, phase="prefill")] == ["phase-not-served"]
    assert asked == []
    assert [reason.code for reason in reasons(backend, MLA)] == ["special"]
    assert asked == ["decode"]


def test_one_code_is_given_once_as_the_plan_says_it(spec: MakeSpec) -> None:
    """Capabilities hold for every device, the plan knows this one."""
    backend = spec(plan=lambda *_: [Reason("special", "no luck"), Reason("block-size", "of the plan")])
    found = reasons(backend, {**PLAIN, "block_size": 24})
    assert [(reason.code, reason.message) for reason in found] == [
        ("block-size", "of the plan"),
        ("special", "no luck"),
    ]


def test_plan_gets_what_it_needs(spec: MakeSpec, plan: MakePlan) -> None:
    seen: list[Any] = []
    made = plan()

    def function(*arguments: Any) -> BackendPlan:
        seen.append(arguments)
        return made

    config, options = AttentionConfig(**PLAIN), BackendOptions()
    assert gate.check(spec(plan=function), config, H100, ASSUMED, options, "prefill") is made
    assert seen == [(config, H100, ASSUMED, options, "prefill")]


def raise_(error: BaseException) -> Callable[..., Any]:
    def plan(*_: Any) -> Any:
        raise error

    return plan


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (raise_(ZeroDivisionError("no kernels")), "ZeroDivisionError: no kernels"),
        (lambda *_: None, "None"),
        (lambda *_: [], "[]"),
    ],
)
def test_a_bug_in_plan_is_shown_and_not_hidden(spec: MakeSpec, function: Any, named: str) -> None:
    found = reasons(spec(plan=function), {**PLAIN, "sinks": True})
    assert [reason.code for reason in found] == ["sinks", "plugin-error"]
    assert "PLAIN" in found[1].message
    assert named in found[1].message
    assert found[1].message.isprintable()
    assert [reason.code for reason in reasons(spec(plan=function), PLAIN)] == ["plugin-error"]


@pytest.mark.parametrize(
    "changes",
    [
        {"cuda_graph": "SOMETIMES"},
        {"kernel_block_sizes": ()},
        {"kv_layouts": ("FLASH_ATTN_NHD", "NO_SUCH_LAYOUT")},
        {"unverified": "a string"},
        {"unverified": ["a list"]},
    ],
)
def test_a_plan_of_the_wrong_shape_is_a_bug_of_the_plugin(
    spec: MakeSpec, plan: MakePlan, changes: dict[str, Any]
) -> None:
    found = reasons(spec(plan=lambda *_: plan(**changes)), PLAIN)
    assert [reason.code for reason in found] == ["plugin-error"]
    assert next(iter(changes)) in found[0].message


@pytest.mark.parametrize("block_size", [8, 24, 40])
def test_a_plan_without_the_block_size_that_was_declared_is_a_bug_of_the_plugin(
    spec: MakeSpec, capabilities: MakeCapabilities, plan: MakePlan, block_size: int
) -> None:
    both = capabilities(block_sizes=(8, 16))
    backend = spec(capabilities={"prefill": both, "decode": both}, plan=lambda *_: plan(kernel_block_sizes=(16,)))
    (found,) = reasons(backend, {**PLAIN, "block_size": block_size})
    assert found.code == "plugin-error"
    assert found.message == (
        f"bug in the plugin that registers PLAIN: block_sizes declares that blocks of {block_size} are read, and "
        "plan().kernel_block_sizes = (16,) (accepted: a size that divides it, or a reason against it)"
    )
    assert reasons(backend, {**PLAIN, "block_size": 48}) == []
    assert reasons(backend, PLAIN) == []


@pytest.mark.parametrize("wanted", CUDA_GRAPH_LEVELS)
@pytest.mark.parametrize("offered", CUDA_GRAPH_LEVELS)
def test_levels_of_cuda_graphs(spec: MakeSpec, plan: MakePlan, wanted: str, offered: str) -> None:
    backend = spec(plan=lambda *_: plan(cuda_graph=offered))
    found = reasons(backend, {**PLAIN, "cuda_graph": wanted})
    if CUDA_GRAPH_LEVELS.index(offered) >= CUDA_GRAPH_LEVELS.index(wanted):
        assert found == []
        return
    (reason,) = found
    assert (reason.code, reason.observed, reason.supported) == ("cuda-graph-level", wanted, offered)
    assert reason.remedy == f"--cuda-graph {offered}"
    assert wanted in reason.message
    assert offered in reason.message


CHUNKED = {**PLAIN, "attention_chunk_size": 48}


def test_chunks_are_requests_of_their_own(spec: MakeSpec, plan: MakePlan) -> None:
    """The blocks of such a plan divide a chunk, and captured steps hold one token of each request."""
    wide = spec(plan=lambda *_: plan(kernel_block_sizes=(64, 48, 16), notes=("slow",)))
    for size, kept in ((48, (48, 16)), (128, (64, 16))):
        found = check(wide, {**CHUNKED, "attention_chunk_size": size})
        assert isinstance(found, BackendPlan)
        assert (found.kernel_block_sizes, found.cuda_graph) == (kept, "UNIFORM_SINGLE_TOKEN_DECODE")
        assert found.notes[0] == "slow"
        assert "each chunk is a request of its own" in found.notes[1]
    of_32 = check(wide, {**CHUNKED, "block_size": 32})
    assert isinstance(of_32, BackendPlan)
    assert of_32.kernel_block_sizes == (16,)


def test_chunks_that_no_block_divides_are_refused(spec: MakeSpec, plan: MakePlan) -> None:
    backend = spec(plan=lambda *_: plan(kernel_block_sizes=(64, 32)))
    (reason,) = reasons(backend, CHUNKED)
    assert (reason.code, reason.observed) == ("attention-chunk-size", 48)
    assert reason.message == (
        "attention inside chunks of 48 (supported: multiples of a block size of the kernel, 64 or 32)"
    )
    assert reasons(backend, {**CHUNKED, "attention_chunk_size": 96}) == []
    (reason,) = reasons(backend, {**CHUNKED, "attention_chunk_size": 64, "cuda_graph": "ALWAYS"})
    assert reason.code == "cuda-graph-level"
