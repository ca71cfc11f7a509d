"""What a stranger's backend does wrong is said with its name and its distribution, before or while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_select import AttentionConfig
from attn_select.backends.registry import load_plugins
from attn_select.backends.spec import BackendSpec
from attn_select.errors import BackendError, PluginError
from attn_select.layer.state import StateConfig
from attn_select.reference.running import common_of
from attn_select.reference.state_serving import StateServing
from attn_select.runtime import Attention as HeadAttention
from attn_select.runtime import AttentionImpl, BatchError, attention_group
from attn_select.runtime import MLAAttention as LatentAttention
from attn_select.runtime.states import StateBackend
from attn_select.testing import load_path_of, mla_layer, random_problem, selection_of

HEADS = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
MLA = mla_layer(num_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
STATE = StateConfig(recurrence="gated_delta_net", num_heads=2, head_size=16)
OWNER = "(acme-attention 1.0)"
REQUESTS = [(1, 20), (7, 9)]


def acme(backend: Any, name: str = "TORCH_SDPA") -> BackendSpec:
    """The spec of a backend of ours with another runtime, as a stranger's distribution would register it."""
    return replace(load_plugins().specs[name], load=load_path_of(backend), distribution="acme-attention 1.0")


def runtime(name: str = "TORCH_SDPA") -> Any:
    return load_plugins().specs[name].get_class()


def broken(name: str = "TORCH_SDPA", *, impl: Any = None, builder: Any = None, **attributes: Any) -> BackendSpec:
    """A backend whose impl or builder has other methods, given as functions by name."""
    own = runtime(name)
    made: dict[str, Any] = dict(attributes)
    if impl is not None:
        made["impl_cls"] = type("AcmeImpl", (own.impl_cls,), impl)
    if builder is not None:
        made["builder_cls"] = type("AcmeBuilder", (own.builder_cls,), builder)
    return acme(type("AcmeBackend", (own,), made), name)


def run(spec: BackendSpec, requests: Any = REQUESTS) -> torch.Tensor:
    """Make a group and a layer of per-head attention, and run a step of a decode and a prompt."""
    selection = selection_of(spec, HEADS, "cpu")
    group = attention_group(selection)
    problem = random_problem(0, HEADS, selection.kv_layout, requests=requests)
    layer = HeadAttention(group)
    assert problem.kv_cache is not None
    output: torch.Tensor = layer(
        problem.query, problem.key, problem.value, problem.kv_cache, group.build(common_of(problem))
    )
    return output


def run_mla(spec: BackendSpec) -> None:
    """The same with latents; the prompt has cached tokens."""
    selection = selection_of(spec, MLA, "cpu")
    group = attention_group(selection)
    problem = random_problem(0, MLA, selection.kv_layout, requests=REQUESTS)
    rank, rows = MLA.kv_lora_rank, MLA.num_heads * 32
    layer = LatentAttention(group, torch.randn(rows, rank, dtype=torch.bfloat16))
    layer(problem.query, problem.key, problem.value, problem.kv_cache, group.build(common_of(problem)))


def run_states(spec: BackendSpec) -> None:
    serving = StateServing(selection_of(spec, STATE, "cpu"), 4, 0)
    serving.add("a")
    serving.run({"a": 5})


def raises(*_: Any, **__: Any) -> None:
    raise KeyError("x")


def nothing(*_: Any, **__: Any) -> None: ...


SHAPES: dict[str, tuple[Callable[[], BackendSpec], str]] = {
    "an impl without the base": (
        lambda: broken(impl_cls=type("AcmeImpl", (), {})),
        r"AcmeBackend.impl_cls = .*AcmeImpl.*\(accepted: a subclass of attn_select.runtime.backend.AttentionImpl\)",
    ),
    "no builder": (lambda: broken(builder_cls=None), r"AcmeBackend.builder_cls = None \(accepted: a subclass of"),
    "no base": (
        lambda: acme(type("AcmeBackend", (), {"impl_cls": runtime().impl_cls})),
        r"load names .*AcmeBackend.*\(accepted: a subclass of AttentionBackend or StateBackend",
    ),
    "a backend of states": (
        lambda: acme(type("AcmeBackend", (StateBackend,), {})),
        r"load names .*AcmeBackend.*\(accepted: a subclass of attn_select.runtime.backend.AttentionBackend\)",
    ),
    "no forward": (
        lambda: broken(impl_cls=type("AcmeImpl", (AttentionImpl,), {})),
        "AcmeImpl has no forward",
    ),
    "another signature of forward": (
        lambda: broken(impl={"forward": lambda self, query, key, value, cache: None}),
        r"AcmeImpl.forward\(\) is called with \(query, key, .*outputs\), and: too many positional",
    ),
    "one argument more": (
        lambda: broken(impl={"do_kv_cache_update": lambda self, k, v, cache, slots, more: None}),
        r"AcmeImpl.do_kv_cache_update\(\) is called with .*, and: missing a required argument: 'more'",
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_another_shape_of_the_classes_is_refused_when_the_group_is_made(name: str) -> None:
    make, said = SHAPES[name]
    with pytest.raises(PluginError, match=said) as caught:
        attention_group(selection_of(make(), HEADS, "cpu"))
    assert caught.value.message.startswith(f"bug in the plugin that registers TORCH_SDPA {OWNER}: ")


def test_other_names_more_defaults_and_catch_alls_are_no_fault() -> None:
    own = runtime()

    def forward(self: Any, q: Any, k: Any, *rest: Any, extra: int = 0, **_: Any) -> Any:
        return own.impl_cls.forward(self, q, k, *rest)

    def build(self: Any, prefix: Any, batch: Any, quick: bool = False, *, more: int = 0) -> Any:
        return own.builder_cls.build(self, prefix, batch, quick)

    right = run(load_plugins().specs["TORCH_SDPA"])
    assert torch.equal(run(broken(impl={"forward": forward}, builder={"build": build})), right)


RUNS: dict[str, tuple[Callable[[], BackendSpec], str]] = {
    "forward raises": (lambda: broken(impl={"forward": raises}), r"forward\(\)"),
    "build raises": (lambda: broken(builder={"build": raises}), r"build\(\)"),
    "the builder raises": (lambda: broken(builder={"__init__": raises}), "its builder"),
    "preparing raises": (lambda: broken(prepare=classmethod(raises)), "load = '.*'"),
}


@pytest.mark.parametrize("name", RUNS)
def test_what_it_raises_is_said_with_its_name(name: str) -> None:
    make, call = RUNS[name]
    with pytest.raises(BackendError, match=rf"^backend TORCH_SDPA \(acme-attention 1.0\): {call} raised KeyError: 'x'"):
        run(make())


@pytest.mark.parametrize("requests", [[(1, 20)], REQUESTS], ids=["decode", "both"])
@pytest.mark.parametrize(
    ("spec", "call", "wanted"),
    [
        (lambda: broken(impl={"forward": nothing}), "forward", "the output that it wrote"),
        (lambda: broken(builder={"build": nothing}), "build", "the metadata that forward takes"),
    ],
    ids=["forward", "build"],
)
def test_a_call_that_returns_nothing_is_named(requests: Any, spec: Any, call: str, wanted: str) -> None:
    said = rf"^bug in the plugin that registers TORCH_SDPA \(acme-attention 1.0\): {call}\(\) returned None"
    with pytest.raises(PluginError, match=rf"{said} \(accepted: {wanted}\)"):
        run(spec(), requests)


@pytest.mark.parametrize(
    "error", [BatchError("ours"), MemoryError("all"), torch.OutOfMemoryError("all"), KeyboardInterrupt]
)
def test_documented_errors_and_those_of_memory_stay_as_they_are(error: Any) -> None:
    def forward(*_: Any) -> None:
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)) as caught:
        run(broken(impl={"forward": forward}))
    assert type(caught.value) is (error if isinstance(error, type) else type(error))


@pytest.mark.parametrize(
    ("parts", "error", "call"),
    [
        ({"impl": {"forward_mqa": raises}}, BackendError, r"forward_mqa\(\) raised KeyError"),
        ({"impl": {"forward_mha": raises}}, BackendError, r"forward_mha\(\) raised KeyError"),
        ({"impl": {"forward_mqa": nothing}}, PluginError, r"forward_mqa\(\) returned None"),
        ({"builder": {"build_prefill": nothing}}, PluginError, r"build_prefill\(\) returned None"),
        ({"impl": {"forward_mqa": lambda self, query: None}}, PluginError, r"forward_mqa\(\) is called with"),
        (
            {"impl_cls": object},
            PluginError,
            r"accepted: a subclass of .*MLAAttentionImpl",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_latent_layers(parts: Any, error: Any, call: str) -> None:
    with pytest.raises(error, match=call) as caught:
        run_mla(broken("TORCH_MLA", **parts))
    assert f"TORCH_MLA {OWNER}: " in caught.value.message


@pytest.mark.parametrize(
    ("parts", "error", "call"),
    [
        ({"impl": {"forward": raises}}, BackendError, r"forward\(\) raised KeyError"),
        ({"impl": {"__init__": raises}}, BackendError, "its impl raised KeyError"),
        ({"impl": {"forward": lambda self, phase: None}}, PluginError, r"forward\(\) is called with \(phase, query"),
        (
            {"impl_cls": object},
            PluginError,
            r"accepted: a subclass of .*\.StateImpl",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_layers_that_keep_a_state(parts: Any, error: Any, call: str) -> None:
    with pytest.raises(error, match=call) as caught:
        run_states(broken("TORCH_STATE", **parts))
    assert f"TORCH_STATE {OWNER}: " in caught.value.message
