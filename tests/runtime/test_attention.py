"""The ``Attention`` layer: what it writes, what it leaves alone, and what it refuses before a kernel starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_select import select
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig
from attn_select.reference.running import common_of
from attn_select.runtime import Attention, AttentionGroup, BatchError, Scales, attention_group, forward_context
from attn_select.testing import Problem, random_problem, relative_error, same_bits

Factory = Callable[..., Any]
SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
CONFIG = AttentionConfig(**SMALL)
FLASH = "FLASH_ATTN_NHD"
DTYPE_ERROR = {"float32": 1e-5, "bfloat16": 2**-8, "float16": 2**-11}
"""One rounding of the output, on top of float32's."""


@pytest.mark.parametrize("dtype", DTYPE_ERROR)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "fp8_e5m2", "float16"])
@pytest.mark.parametrize("layout", ["FLASH_ATTN_NHD", "FLASHINFER_NHD", "FLASHINFER_HND", "PAGED_ATTENTION"])
def test_writes_and_attends(
    make_toy: Factory, make_group: Factory, layout: str, kv_cache_dtype: str, dtype: str
) -> None:
    config = AttentionConfig(**{**SMALL, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype})
    problem = random_problem(1, config, layout)
    group = make_group(config, make_toy(layouts=(layout,)))
    layer = Attention(group, scales=scales_of(problem))
    assert problem.kv_cache is not None
    cache = problem.kv_cache.clone()
    output = layer(problem.query, problem.key, problem.value, cache, group.build(common_of(problem)))
    assert output.dtype == problem.query.dtype
    assert relative_error(output, problem.reference()[0]).row < DTYPE_ERROR[dtype]
    assert same_bits(cache, problem.written_cache())


def scales_of(problem: Problem) -> Scales | None:
    if problem.k_scale is None or problem.v_scale is None:
        return None
    heads = problem.config.num_kv_heads if problem.config.per_head_quant_scales else 0
    return Scales.make("cpu", k=problem.k_scale, v=problem.v_scale, num_kv_heads=heads)


def test_scales_per_head(make_group: Factory) -> None:
    config = AttentionConfig(**SMALL, kv_cache_dtype="fp8_e4m3", per_head_quant_scales=True)
    problem = random_problem(2, config, FLASH)
    group = make_group(config)
    cache = problem.kv_cache.clone()  # type: ignore[union-attr]
    layer = Attention(group, scales=scales_of(problem))
    output = layer(problem.query, problem.key, problem.value, cache, group.build(common_of(problem)))
    assert relative_error(output, problem.reference()[0]).row < 1e-5
    assert same_bits(cache, problem.written_cache())
    assert Attention(group).terms.scales.k.tolist() == [1.0, 1.0]


class Step:
    """One problem with the arguments of a layer call, to be changed one at a time."""

    def __init__(self, group: AttentionGroup, problem: Problem, common: Any) -> None:
        self.group, self.problem = group, problem
        self.metadata = group.build(common)
        self.cache = None if problem.kv_cache is None else problem.kv_cache.clone()
        self.layer = Attention(group)

    def __call__(self, **changes: Any) -> Tensor:
        given = {
            "query": self.problem.query,
            "key": self.problem.key,
            "value": self.problem.value,
            "kv_cache": self.cache,
            "attn_metadata": self.metadata,
        }
        result: Tensor = self.layer(**{**given, **changes})
        return result


@pytest.fixture
def step(make_toy: Factory, make_group: Factory) -> Step:
    problem = random_problem(4, CONFIG, FLASH)
    return Step(make_group(CONFIG, make_toy()), problem, common_of(problem))


def test_a_layer_that_shares_a_cache_only_reads_it(step: Step) -> None:
    written = step()
    before = step.cache.clone()  # type: ignore[union-attr]
    owner = Attention(step.group)
    shared = Attention(step.group, kv_sharing_target=owner)
    output = shared(step.problem.query, None, None, step.cache, step.metadata)
    assert same_bits(output, written)
    assert same_bits(step.cache, before)  # type: ignore[arg-type]
    assert shared.kv_sharing_target == owner.layer_name
    with pytest.raises(BatchError, match=f"reads the cache of '{owner.layer_name}' and writes nothing"):
        shared(step.problem.query, step.problem.key, step.problem.value, step.cache, step.metadata)
    assert [*shared.children()] == []


def test_layers_that_share_a_cache_agree_about_it(make_group: Factory) -> None:
    fp8 = {**SMALL, "kv_cache_dtype": "fp8_e4m3"}
    group = make_group(AttentionConfig(**fp8))
    owner = Attention(group, scales=Scales.make("cpu", k=0.5))
    Attention(
        make_group(AttentionConfig(**fp8, sliding_window=8)), scales=Scales.make("cpu", k=0.5), kv_sharing_target=owner
    )
    shared = Attention(group, scales=Scales.make("cpu", k=0.5, q=2.0), kv_sharing_target=owner)
    with pytest.raises(ConfigError, match="that layer keeps no cache of its own"):
        Attention(group, kv_sharing_target=shared)
    with pytest.raises(ConfigError, match="k and v scales"):
        Attention(group, kv_sharing_target=owner)
    other = make_group(AttentionConfig(**{**fp8, "num_kv_heads": 4}))
    with pytest.raises(ConfigError, match="KV heads"):
        Attention(other, scales=Scales.make("cpu", k=0.5), kv_sharing_target=owner)


def test_every_argument_may_be_a_view(step: Step) -> None:
    problem = step.problem
    packed = torch.cat([problem.query.flatten(1), problem.key.flatten(1), problem.value.flatten(1)], dim=1)
    query, key, value = packed.split([128, 64, 64], dim=1)
    output = torch.zeros(len(query), 4, 40)[..., 4:36]
    step(query=query.view(-1, 4, 32), key=key.view(-1, 2, 32), value=value.view(-1, 2, 32), output=output)
    assert relative_error(output, problem.reference()[0]).row < 1e-5


@pytest.mark.parametrize("prefill_writes", [True, False])
def test_one_of_two_backends_writes_in_its_forward(
    make_toy: Factory, make_group: Factory, prefill_writes: bool
) -> None:
    """Then the other one writes the batch: its own tokens would be missing otherwise."""
    decode = make_toy("DECODER", phases=("decode",), includes_update=not prefill_writes)
    prefill = make_toy("PREFILLER", phases=("prefill",), includes_update=prefill_writes)
    problem = random_problem(6, CONFIG, FLASH, requests=[(1, 20), (1, 3), (6, 17)])
    step = Step(make_group(CONFIG, decode, prefill), problem, common_of(problem))
    step()
    assert same_bits(step.cache, problem.written_cache())  # type: ignore[arg-type]
    assert (decode.calls, prefill.calls) == (
        (["update", "forward"], ["forward"]) if prefill_writes else (["forward"], ["update", "forward"])
    )


WRONG: dict[str, tuple[Callable[[Step], dict[str, Any]], str]] = {
    "query heads": (lambda s: {"query": s.problem.query[:, :3]}, r"query of shape \(\d+, 3, 32\): accepted is"),
    "query tokens": (lambda s: {"query": s.problem.query[1:]}, r"query .*accepted is \(at least \d+ tokens, 4, 32\)"),
    "query dtype": (lambda s: {"query": s.problem.query.half()}, "query is torch.float16: accepted is torch.float32"),
    "key tokens": (lambda s: {"key": s.problem.key[1:]}, r"key .*accepted is \(at least \d+ tokens, 2, 32\)"),
    "key dtype": (lambda s: {"key": s.problem.key.double()}, "key is torch.float64: accepted is torch.float32"),
    "no key": (lambda s: {"key": None}, "key is None: layer .* needs the key and the value of the step's tokens"),
    "no cache": (lambda s: {"kv_cache": None}, "kv_cache is None: attn_type = 'decoder' keeps one in layout FLASH"),
    "cache shape": (lambda s: {"kv_cache": s.cache[..., :8]}, r"kv_cache of shape .*: layout FLASH_ATTN_NHD is"),
    "cache blocks": (
        lambda s: {"kv_cache": s.cache.view(2, -1, 8, 2, 32)},
        r"kv_cache of shape .* has 8 tokens per block: accepted are 16",
    ),
    "cache dtype": (lambda s: {"kv_cache": s.cache.half()}, r"kv_cache is torch.float16 on cpu: accepted is"),
    "output tokens": (lambda s: {"output": torch.zeros(1, 4, 32)}, r"output of shape \(1, 4, 32\): accepted is"),
    "output dtype": (
        lambda s: {"output": torch.zeros(299, 4, 32).half()},
        "output is torch.float16: accepted is torch.float32",
    ),
    "lse dtype": (
        lambda s: {"output_lse": torch.zeros(299, 4).double()},
        "output_lse is torch.float64: accepted is torch.float32",
    ),
    "block scale": (
        lambda s: {"output_block_scale": torch.tensor(1.0)},
        "output_block_scale given, but output_quantization = 'none'",
    ),
    "no metadata": (lambda s: {"attn_metadata": None}, "no attn_metadata was given and the forward context has none"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_named_before_anything_runs(step: Step, kind: str) -> None:
    change, message = WRONG[kind]
    before = step.cache.clone()  # type: ignore[union-attr]
    with pytest.raises((BatchError, ConfigError), match=message):
        step(**change(step))
    assert same_bits(step.cache, before)  # type: ignore[arg-type]


def test_a_quantised_output(make_group: Factory) -> None:
    config = AttentionConfig(**SMALL, output_quantization="fp8")
    problem = random_problem(8, config, FLASH)
    step = Step(make_group(config), problem, common_of(problem))
    scale = torch.tensor(0.25)
    output = step(output_scale=scale)
    assert output.dtype == torch.float8_e4m3fn
    assert relative_error(output.float() * scale, problem.reference()[0]).norm < 2**-4
    with pytest.raises(BatchError, match="output_scale missing, but output_quantization = 'fp8'"):
        step()
    with pytest.raises(BatchError, match="output_block_scale given, but output_quantization = 'fp8'"):
        step(output_scale=scale, output_block_scale=scale)
    with pytest.raises(BatchError, match=r"output is torch.float32: accepted is torch.float8_e4m3fn"):
        step(output_scale=scale, output=torch.zeros(299, 4, 32))


def test_fp4_packs_two_numbers_in_a_byte(make_toy: Factory, make_group: Factory) -> None:
    config = AttentionConfig(**SMALL, output_quantization="fp4")
    toys = [make_toy("DECODER", phases=("decode",)), make_toy("PREFILLER", phases=("prefill",))]
    problem = random_problem(8, config, FLASH, requests=[(1, 9), (4, 9)])
    step = Step(make_group(config, *toys), problem, common_of(problem))
    scale = torch.tensor(0.25)
    with pytest.raises(BatchError, match="output_block_scale missing, but output_quantization = 'fp4'"):
        step(output_scale=scale)
    with pytest.raises(BatchError, match=r"output of shape \(299, 4, 32\): accepted is \(at least 5 tokens, 4, 16\)"):
        step(output_scale=scale, output_block_scale=scale, output=torch.zeros(299, 4, 32))
    with pytest.raises(BatchError, match="output_block_scale given, but two backends share the batch"):
        step(output_scale=scale, output_block_scale=scale)
    decodes = random_problem(8, config, FLASH, requests=[(1, 9), (1, 9)])
    decode = Step(step.layer.group, decodes, common_of(decodes))
    assert decode(output_scale=scale, output_block_scale=scale).shape == (2, 4, 16)
    assert toys[0].calls[-1] == "forward"  # all rows are this backend's


def test_the_forward_context_stands_in_for_metadata(step: Step, make_group: Factory) -> None:
    expected = step()
    with forward_context({step.group: step.metadata}):
        assert same_bits(step(attn_metadata=None), expected)
        with forward_context({}), pytest.raises(BatchError, match="run inside `with forward_context"):
            step(attn_metadata=None)
        assert same_bits(step(attn_metadata=None), expected)
    with pytest.raises(BatchError, match=rf"layer {step.layer.layer_name!r}: no attn_metadata"):
        step(attn_metadata=None)


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Heads without a sink beside heads that have one."""
    plain, sunk = (AttentionConfig(**SMALL, sinks=sinks) for sinks in (False, True))
    layout = attention_group(select(plain, "cpu")).kv_layout
    problem = random_problem(0, plain, layout, requests=[(1, 40), (7, 9)])
    outputs = []
    for config, sinks in ((plain, None), (sunk, torch.tensor([-inf, 0.5, -inf, 3.0]))):
        group = attention_group(select(config, "cpu"))
        assert problem.kv_cache is not None
        cache = problem.kv_cache.clone()
        metadata = group.build(common_of(problem))
        outputs.append(Attention(group, sinks=sinks)(problem.query, problem.key, problem.value, cache, metadata))
    assert outputs[0].isfinite().all()
    assert torch.allclose(outputs[0][:, ::2], outputs[1][:, ::2], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(outputs[0][:, 1::2], outputs[1][:, 1::2], rtol=1e-3)


def test_slopes_and_sinks_reach_the_backend(make_group: Factory) -> None:
    layer = Attention(
        make_group(AttentionConfig(**SMALL, alibi=True, sinks=True)),
        alibi_slopes=torch.arange(4, dtype=torch.float64),
        sinks=torch.arange(8.0).bfloat16()[::2],
    )
    assert layer.impls["decode"] is layer.impls["prefill"]
    terms = layer.impls["decode"].terms
    assert terms.alibi_slopes is not None
    assert terms.sinks is not None
    assert (terms.alibi_slopes.dtype, terms.alibi_slopes.tolist()) == (torch.float32, [0, 1, 2, 3])
    assert (terms.sinks.dtype, terms.sinks.tolist()) == (torch.bfloat16, [0, 2, 4, 6])
    assert terms.sinks.is_contiguous()


def test_names_of_living_layers_are_unique(make_group: Factory) -> None:
    group = make_group(CONFIG)
    first = Attention(group, layer_name="model.layers.0")
    with pytest.raises(ConfigError, match=r"model.layers.0.: a layer of that name exists\n.*a name of its own"):
        Attention(group, layer_name="model.layers.0")
    del first
    Attention(group, layer_name="model.layers.0")


@pytest.mark.parametrize("twin", [False, True])
def test_metadata_of_another_group_is_refused(step: Step, make_group: Factory, twin: bool) -> None:
    """A window's metadata in a full layer would hide most keys without a word. A group of equal layers is another."""
    other = make_group(CONFIG if twin else AttentionConfig(**SMALL, sliding_window=8))
    metadata = other.build(common_of(step.problem))
    before = step.cache.clone()  # type: ignore[union-attr]
    with pytest.raises(BatchError, match=rf"layer {step.layer.layer_name!r}: attn_metadata was built by another group"):
        step(attn_metadata=metadata)
    with forward_context({step.group: metadata}), pytest.raises(BatchError, match="was built by another group"):
        step(attn_metadata=None)
    assert same_bits(step.cache, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("silent", ["prefill", "decode"])
def test_a_phase_without_lse(make_toy: Factory, make_group: Factory, silent: str) -> None:
    """Whole batches of one backend hold both phases: both plans have to return the LSE."""
    speaking = {"prefill", "decode"} - {silent}
    problem = random_problem(7, CONFIG, FLASH)
    step = Step(make_group(CONFIG, make_toy("HALF", returns_lse=speaking)), problem, common_of(problem))
    with pytest.raises(BatchError, match="output_lse given, but HALF returns no LSE"):
        step(output_lse=torch.zeros(299, 4))


@pytest.mark.parametrize("made_by", [copy.copy, copy.deepcopy])
def test_a_copied_layer_has_a_name_of_its_own(step: Step, made_by: Callable[[Attention], Attention]) -> None:
    twin = made_by(step.layer)
    assert twin.layer_name != step.layer.layer_name
    assert twin.group is step.group
    expected = step()
    twin.impls["decode"].terms = replace(twin.terms, scale=0.0)
    for layer, same in ((step.layer, made_by is copy.deepcopy), (twin, False)):
        output = torch.zeros_like(expected)
        given = (step.problem.query, step.problem.key, step.problem.value, step.cache, output, layer.layer_name)
        with forward_context({step.group: step.metadata}):
            torch.ops.attn_select.attention(*given)
        assert same_bits(output, expected) == same
