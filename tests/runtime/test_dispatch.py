"""Dispatch by step: backends that read one cache take turns, by synthetic times."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decider import Decider
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_select import select
from attn_select.backends.registry import Registry
from attn_select.decide.explicit import Choice
from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError
from attn_select.layer.config import AttentionConfig, Phase
from attn_select.machine.device import CPU
from attn_select.machine.environment import Environment
from attn_select.reference.running import common_of
from attn_select.rules.layers import RuleSet
from attn_select.rules.plugins import load_plugins
from attn_select.runtime import (
    Attention,
    AttentionGroup,
    BatchError,
    Capacity,
    MLAAttention,
    attention_group,
)
from attn_select.runtime.cuda_graph import CudaGraphRunner, StaticBatch, check_level
from attn_select.testing import plan_of, random_mla_problem, random_problem, relative_error, same_bits
from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.evidence import Evidence
from attn_select.times.measurement import Measurement
from attn_select.times.store import MeasurementFile, Stored, StoredMeasurement, append_measurements
from attn_select.times.timed_layer import timed_layer
from attn_select.times.workload import parse_workload
from attn_select_measure.fitting.fit import fit
from attn_select_measure.fitting.keeping import fit_file

SMALL: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": "float32"}
CONFIG = AttentionConfig(**SMALL, block_size=16)
MLA = AttentionConfig(num_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
CAPACITY = Capacity(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=2048)
DECODES = ("q1s16", "q1s64", "q1s512", "4q1s64", "8q1s256", "16q1s16", "32q1s512", "64q1s64", "64q1s1k", "2q1s1k")
PREFILLS = ("q8", "q32", "q128", "4q16", "2q64s256", "q512", "8q32", "q16s512", "3q128s2k")
MIXED = ("q8_4q1s64", "q128_16q1s512", "q512_2q1s64", "4q16_32q1s64")
WORKLOAD = "4q1s64,32q1s512,q32,3q128s2k"
"""Measured itself, so that margins make no tie."""
Times = Callable[[int, bool], float]
"""Microseconds of a step by its keys, and whether it is a decode."""
FEW: Times = lambda keys, decode: 5 + keys / 100  # noqa: E731
MANY: Times = lambda keys, decode: 20 + keys / 400  # noqa: E731
"""Equal at 2000 keys."""


def measured(
    backend: str, times: Times, kernels: Mapping[Phase, str], config: AttentionConfig, batches: Sequence[str]
) -> list[Measurement]:
    """Return what a backend of these times was measured with, on this machine's CPU."""
    found = []
    for text in batches:
        batch = parse_batch_shape(text)
        phases = {"decode" if group.query_len == 1 else "prefill" for group in batch.groups}
        if not phases <= set(kernels):
            continue
        parts = {
            decode: sum(g.count * g.seq_len for g in batch.groups if (g.query_len == 1) == decode)
            for decode in (True, False)
        }
        time_us = sum(times(keys, decode) for decode, keys in parts.items() if keys)
        found.append(
            Measurement(
                gpu=CPU.full_name,
                compute_capability="cpu",
                backend=backend,
                kernel={phase: kernels[phase] for phase in kernels if phase in phases},
                config=timed_layer(config).to_dict(),
                batch=text,
                time_us=time_us,
                method="eager",
                rounds=9,
                spread_us=(0.999 * time_us, 1.001 * time_us),
                date="2026-11-22",
            )
        )
    return found


Decide = Callable[..., Selection]


@pytest.fixture
def decide() -> Decide:
    """Return ``decide(config, (toy, times), …)``: the selection among toys, by their times."""

    def make(
        config: AttentionConfig,
        *toys: tuple[Any, Times],
        workload: str | None = WORKLOAD,
        batches: Sequence[str] = (*DECODES, *PREFILLS, *MIXED),
        backend: str | None = None,
    ) -> Selection:
        specs = {toy.spec.name: toy.spec for toy, _ in toys}
        decider = Decider(
            Registry(specs=specs, owners=dict.fromkeys(specs, "test")),
            RuleSet(),
            CPU,
            Environment(assume_installed=True),
        )
        file, rows = MeasurementFile("user", Path("cpu.jsonl")), []
        for toy, times in toys:
            kernels: dict[Phase, str] = {p: f"{toy.spec.name.lower()}-{p}" for p in toy.spec.capabilities}
            for line, each in enumerate(measured(toy.spec.name, times, kernels, config, batches), 1):
                rows.append(StoredMeasurement(each, file, line))
        evidence = Evidence(lambda layer: Stored(tuple(rows), (), ()), CPU, decider.environment, fit)
        choice = Choice(default=backend)
        if workload is None:
            return decider.decide(config, choice)
        return decider.decide(config, choice, workload=parse_workload(workload), evidence=evidence)

    return make


@pytest.fixture
def two(make_toy: Any, decide: Decide) -> Callable[..., Selection]:
    """Return ``two(config, **options)``: the selection of FEW, fast for few keys, and MANY; ``options`` are MANY's."""

    def make(config: AttentionConfig = CONFIG, workload: str | None = WORKLOAD, **options: Any) -> Selection:
        return decide(config, (make_toy("FEW"), FEW), (make_toy("MANY", **options), MANY), workload=workload)

    return make


def ran(metadata: Any) -> list[tuple[str, str]]:
    return [(part.phase, part.backend) for part in metadata.parts]


def names(group: AttentionGroup) -> list[str]:
    return [served.spec.name for served in group.backends]


def test_the_predicted_fastest_runs_the_step(two: Any, make_batch: Any) -> None:
    group = attention_group(two(), capacity=CAPACITY, dispatch="measured")
    assert sorted(names(group)) == ["FEW", "MANY"]
    build = group.build
    assert [part.backend for part in build(make_batch([(1, 64)] * 2)).parts] == ["FEW"]
    assert [part.backend for part in build(make_batch([(1, 512)] * 32)).parts] == ["MANY"]
    assert [part.backend for part in build(make_batch([(64, 64)])).parts] == ["FEW"]
    assert [part.backend for part in build(make_batch([(128, 2000)] * 3)).parts] == ["MANY"]


def test_without_dispatch_the_selection_runs_every_step(two: Any, make_batch: Any) -> None:
    selection = two()
    group = attention_group(selection, capacity=CAPACITY)
    for requests in ([(1, 64)] * 2, [(1, 512)] * 32, [(64, 64)]):
        parts = group.build(make_batch(requests)).parts
        assert [part.backend for part in parts] == [selection.selected["decode"]]
    assert group.dispatch is None


@pytest.mark.parametrize("layout", ["FLASH_ATTN_NHD", "FLASHINFER_NHD", "FLASHINFER_HND"])
@pytest.mark.parametrize("requests", [((1, 40), (1, 7), (5, 17), (30, 30)), ((1, 40), (1, 900), (1, 1500)), ((9, 48),)])
def test_the_oracle_agrees_whichever_backend_ran(
    make_toy: Any, decide: Decide, layout: str, requests: tuple[tuple[int, int], ...]
) -> None:
    outputs = []
    for first, second in ((FEW, MANY), (MANY, FEW)):
        toys = [(make_toy(name, layouts=(layout,)), times) for name, times in (("A", first), ("B", second))]
        group = attention_group(decide(CONFIG, *toys), capacity=CAPACITY, dispatch="measured")
        problem = random_problem(7, CONFIG, layout, requests=requests)
        assert problem.kv_cache is not None
        layer, cache = Attention(group), problem.kv_cache.clone()
        lse = torch.full(problem.query.shape[:2], torch.nan)
        metadata = group.build(common_of(problem))
        output = layer(problem.query, problem.key, problem.value, cache, metadata, output_lse=lse)
        expected, _ = problem.reference()
        assert relative_error(output, expected).row < 1e-5
        assert same_bits(cache, problem.written_cache())
        outputs.append([part.backend for part in metadata.parts])
    assert outputs[0] != outputs[1]


def test_kernels_of_other_block_sizes_see_the_cache_in_their_own(make_toy: Any, decide: Decide) -> None:
    small = make_toy("A", kernel_block_sizes=(4,))
    big = make_toy("B", kernel_block_sizes=(16,))
    group = attention_group(decide(CONFIG, (big, MANY), (small, FEW)), capacity=CAPACITY, dispatch="measured")
    assert {served.spec.name: served.context.block_size for served in group.backends} == {"A": 4, "B": 16}
    for requests, name in ((((1, 40), (1, 7)), "A"), (((1, 1700), (1, 1900)), "B")):
        problem = random_problem(3, CONFIG, "FLASH_ATTN_NHD", requests=requests)
        assert problem.kv_cache is not None
        layer, metadata = Attention(group), group.build(common_of(problem))
        assert [part.backend for part in metadata.parts] == [name]
        output = layer(problem.query, problem.key, problem.value, problem.kv_cache.clone(), metadata)
        assert relative_error(output, problem.reference()[0]).row < 1e-5


def test_phases_of_one_batch_go_to_two_backends_where_that_takes_less(
    make_toy: Any, decide: Decide, make_batch: Any
) -> None:
    quick: Times = lambda keys, decode: 5 + keys / (100 if decode else 10)  # noqa: E731
    other: Times = lambda keys, decode: 5 + keys / (10 if decode else 100)  # noqa: E731
    selection = decide(CONFIG, (make_toy("DECODER"), quick), (make_toy("PREFILLER"), other))
    group = attention_group(selection, capacity=CAPACITY, dispatch="measured")
    assert group.reorder_batch_threshold == 1
    metadata = group.build(make_batch([(1, 300)] * 16 + [(256, 256)]))
    assert ran(metadata) == [("decode", "DECODER"), ("prefill", "PREFILLER")]
    with pytest.raises(BatchError, match="decodes of up to 1 tokens must come first"):
        group.build(make_batch([(256, 256)] + [(1, 300)] * 16))


def test_all_ranks_choose_alike(two: Any, make_batch: Any) -> None:
    """Groups that saw other steps before give the same answers, as does one of a selection that travelled."""
    batches = [make_batch([(1, length)] * count) for count in (1, 5, 40) for length in (30, 130, 260, 1030)]
    groups = [attention_group(two(), capacity=CAPACITY, dispatch="measured") for _ in range(2)]
    forward = [ran(groups[0].build(batch)) for batch in batches]
    backward = [ran(groups[1].build(batch)) for batch in reversed(batches)]
    assert forward == backward[::-1]
    assert len({name for parts in forward for _, name in parts}) == 2


def test_the_sum_of_keys_is_read_where_the_batch_does_not_say_it(two: Any, make_batch: Any) -> None:
    group = attention_group(two(), capacity=CAPACITY, dispatch="measured")
    for requests in ([(1, 64)] * 2, [(1, 512)] * 32):
        batch = make_batch(requests)
        assert batch.num_keys == sum(seq_len for _, seq_len in requests)
        assert ran(group.build(replace(batch, num_keys=None))) == ran(group.build(batch))


def test_a_part_of_a_batch_does_not_keep_the_sum_of_its_keys(make_batch: Any) -> None:
    batch = make_batch([(1, 64), (1, 9)])
    assert batch.num_keys == 73
    assert batch.requests(0, 1).num_keys is None
    assert batch.requests(0, 2).num_keys == 73


def test_memory_of_all_is_stated(two: Any) -> None:
    group = attention_group(two(workspace_bytes=3 << 20), capacity=CAPACITY, dispatch="measured")
    assert group.workspace_bytes == {"FEW": 0, "MANY": 6 << 20}  # one for each kernel
    text = group.explain()
    assert "workspace  6 MiB (" in text
    assert "MANY 6 MiB" in text
    assert "decode     the fastest of MANY, FEW\n" in text
    alone = attention_group(two(workspace_bytes=3 << 20), capacity=CAPACITY)
    assert alone.explain() == "prefill    MANY\ndecode     MANY\nworkspace  6 MiB (MANY 6 MiB)\n"


def test_the_group_is_nan_tail_safe_only_if_all_are(two: Any) -> None:
    assert attention_group(two(), capacity=CAPACITY, dispatch="measured").nan_tail_safe
    assert not attention_group(two(nan_tail_safe=False), capacity=CAPACITY, dispatch="measured").nan_tail_safe


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"batch_invariant": True}, "dispatch = 'measured' with batch_invariant = True: a request's result must not"),
        ({"output_quantization": "fp4"}, "with output_quantization = 'fp4': block scales cannot be split"),
    ],
)
def test_layers_whose_steps_cannot_change_backend(two: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        attention_group(two(AttentionConfig(**SMALL, **fields)), dispatch="measured")


def test_refusals_say_what_is_missing(two: Any, make_toy: Any, decide: Decide) -> None:
    with pytest.raises(ConfigError, match="dispatch = 'fastest': accepted are 'measured' and None"):
        attention_group(two(), dispatch="fastest")
    with pytest.raises(ConfigError, match="the selection was made without a workload") as caught:
        attention_group(two(workload=None), dispatch="measured")
    assert "workload='chat'" in (caught.value.hint or "")
    few, many = (make_toy("FEW"), FEW), (make_toy("MANY"), MANY)
    with pytest.raises(ConfigError, match=r"fewer than two backends .*prefill: FEW is asked for by name; decode: FEW"):
        attention_group(decide(CONFIG, few, many, backend="FEW"), dispatch="measured")
    with pytest.raises(ConfigError, match="no times are known for this layer on this device"):
        attention_group(decide(CONFIG, few, many, batches=()), dispatch="measured")
    exact = decide(CONFIG, few, many, batches=WORKLOAD.split(","))
    with pytest.raises(ConfigError, match=r"decode: \w+ was measured for fewer than 6 batches of decode"):
        attention_group(exact, dispatch="measured")


def test_who_reads_another_cache_stays_out(make_toy: Any, decide: Decide) -> None:
    """One that reads another layout or shares no block size; the group says so."""
    slower: Times = lambda keys, decode: FEW(keys, decode) * 1.5  # noqa: E731
    steep: Times = lambda keys, decode: FEW(keys, decode) * 2  # noqa: E731

    def group_with(**options: Any) -> AttentionGroup:
        toys = ((make_toy("A"), FEW), (make_toy("B"), slower), (make_toy("C", **options), steep))
        return attention_group(decide(CONFIG, *toys), capacity=CAPACITY, dispatch="measured")

    assert sorted(names(group_with())) == ["A", "B", "C"]
    group = group_with(layouts=("FLASHINFER_NHD",))
    assert sorted(names(group)) == ["A", "B"]
    assert "without C does not read FLASH_ATTN_NHD" in group.explain()
    toys = [
        (make_toy(name, layouts=("FLASHINFER_NHD",), kernel_block_sizes=sizes), times)
        for name, sizes, times in (("A", (16,), FEW), ("B", (16,), slower), ("C", (8,), steep))
    ]
    group = attention_group(decide(CONFIG, *toys), capacity=CAPACITY, dispatch="measured")
    assert sorted(names(group)) == ["A", "B"]
    assert "without C shares no block size with A and B in FLASHINFER_NHD" in group.explain()


def test_one_phase_may_have_one_candidate(make_toy: Any, decide: Decide, make_batch: Any) -> None:
    decoders = [(make_toy(name, phases=("decode",)), times) for name, times in (("FEW", FEW), ("MANY", MANY))]
    group = attention_group(decide(CONFIG, (make_toy("BOTH"), lambda *_: 1e4), *decoders), dispatch="measured")
    assert ran(group.build(make_batch([(1, 64)] * 2))) == [("decode", "FEW")]
    assert ran(group.build(make_batch([(1, 512)] * 32 + [(16, 16)]))) == [("decode", "MANY"), ("prefill", "BOTH")]
    assert "prefill    BOTH\n" in group.explain()


def test_drafts_that_a_candidate_does_not_take_for_decodes_are_refused(make_toy: Any, decide: Decide) -> None:
    config = AttentionConfig(**SMALL, num_speculative_tokens=3)
    toys = (make_toy("FEW"), FEW), (make_toy("MANY", reorder=1), MANY)
    with pytest.raises(
        ConfigError, match=r"MANY takes queries of up to 1 tokens for decodes, but with .* have 4\n.*fewer speculative"
    ):
        attention_group(decide(config, *toys), dispatch="measured")


def test_a_group_of_one_phase(two: Any, make_batch: Any) -> None:
    group = attention_group(two(), capacity=CAPACITY, phases=["decode"], dispatch="measured")
    assert ran(group.build(make_batch([(1, 64)] * 2))) == [("decode", "FEW")]
    assert ran(group.build(make_batch([(1, 512)] * 32))) == [("decode", "MANY")]
    assert all(list(served.context.plans) == ["decode"] for served in group.backends)
    with pytest.raises(BatchError, match="this group was made for decode only"):
        group.build(make_batch([(64, 64)]))


def test_a_captured_size_keeps_its_backend(two: Any, make_batch: Any) -> None:
    """A size is chosen by the workload's lengths. A replay's own change nothing, and eager steps go on choosing."""
    selection = two(workload="2q1s512,64q1s512,q32")
    group = attention_group(selection, capacity=CAPACITY, cuda_graphs=True, dispatch="measured")
    static = StaticBatch(group, 1)
    captured = {size: ran(group.build_for_cudagraph_capture(static.dummy(size))) for size in (2, 32)}
    assert captured == {2: [("prefill", "FEW")], 32: [("prefill", "MANY")]}
    for lengths in (16, 2000):
        for size in (2, 32):
            replayed = group.build(static.load(make_batch([(1, lengths)] * (size - 1)), size))
            assert ran(replayed) == captured[size]
    assert ran(group.build(make_batch([(1, 2000)] * 3)))[0][1] == "MANY"
    assert ran(group.build(make_batch([(1, 16)] * 33)))[0][1] == "FEW"
    assert ran(group.build_for_cudagraph_capture(static.dummy(2))) == captured[2]


def test_a_backend_that_cannot_be_captured_runs_eager_steps_alone(two: Any, make_batch: Any) -> None:
    selection = two(level="NEVER")
    assert selection.selected["decode"] == "MANY"  # its own level is the group's then
    selection = two(workload="2q1s64,q8", level="NEVER")
    assert selection.selected["decode"] == "FEW"
    group = attention_group(selection, capacity=CAPACITY, cuda_graphs=True, dispatch="measured")
    check_level(group)
    static = StaticBatch(group, 1)
    assert ran(group.build_for_cudagraph_capture(static.dummy(64)))[0][1] == "FEW"
    assert ran(group.build(make_batch([(1, 2000)] * 3)))[0][1] == "MANY"


def test_mixed_sizes_are_captured_with_the_selected_backend(two: Any) -> None:
    group = attention_group(two(), capacity=CAPACITY, cuda_graphs=True, dispatch="measured")
    group.device = torch.device("cuda")  # of tensors without memory: no kernel is launched
    with FakeTensorMode():
        runner = CudaGraphRunner(lambda inputs, metadata: torch.empty(0), [group], {}, [32, 8], mixed=True)
    group.device = torch.device("cpu")
    static = StaticBatch(group, None)
    for size in runner.sizes:
        assert ran(group.build_for_cudagraph_capture(static.dummy(size))) == [("prefill", "MANY")]


def mla_selection(phases: Sequence[Phase], workload: str, returns_lse: bool = True) -> Selection:
    """Return the selection among TORCH_MLA, fast for few keys, and itself as TWIN_MLA, fast for many."""
    spec = load_plugins().specs["TORCH_MLA"]

    def plan(*arguments: Any) -> Any:
        return replace(spec.plan(*arguments), returns_lse=returns_lse)

    served = {phase: spec.capabilities[phase] for phase in phases}
    twin = replace(spec, name="TWIN_MLA", capabilities=served, plan=plan)
    registry = Registry(specs={"TORCH_MLA": spec, "TWIN_MLA": twin}, owners={"TORCH_MLA": "test", "TWIN_MLA": "test"})
    decider = Decider(registry, RuleSet(), CPU, Environment(assume_installed=True))
    file, rows = MeasurementFile("user", Path("cpu.jsonl")), []
    for name, times in (("TORCH_MLA", FEW), ("TWIN_MLA", MANY)):
        kernels: dict[Phase, str] = {
            phase: plan_of(spec, MLA, "cpu", phase=phase).kernel_name or ""
            for phase in (MLA.phases if name == "TORCH_MLA" else phases)
        }
        found = measured(name, times, kernels, MLA, (*DECODES, *PREFILLS))
        rows += [StoredMeasurement(each, file, line) for line, each in enumerate(found, 1)]
    evidence = Evidence(lambda layer: Stored(tuple(rows), (), ()), CPU, decider.environment, fit)
    return decider.decide(MLA, Choice(), workload=parse_workload(workload), evidence=evidence)


@pytest.mark.parametrize("known", [True, False])
def test_the_lengths_of_the_decodes_decide_beside_a_prefill(
    make_toy: Any, decide: Decide, make_batch: Any, known: bool
) -> None:
    """A prompt's keys are none of the decodes'. Whoever gives no lengths with the batch has them read."""
    decoders = [(make_toy(name, phases=("decode",)), times) for name, times in (("FEW", FEW), ("MANY", MANY))]
    group = attention_group(
        decide(CONFIG, (make_toy("BOTH"), lambda *_: 1e4), *decoders), capacity=CAPACITY, dispatch="measured"
    )
    for lengths, name in (([64] * 3, "FEW"), ([64] * 9 + [2000], "MANY"), ([64] * 10, "FEW")):
        batch = make_batch([(1, length) for length in lengths] + [(64, 2000)])
        assert batch.lead == (len(lengths), 1, max(lengths), (64,), (2000,))
        found = group.build(batch if known else replace(batch, lead=None, num_keys=None))
        assert ran(found) == [("decode", name), ("prefill", "BOTH")]


def test_mla_decodes_take_turns_beside_prefills(make_batch: Any) -> None:
    selection = mla_selection(["decode"], WORKLOAD)
    group: Any = attention_group(selection, capacity=CAPACITY, dispatch="measured")
    for count, name in ((2, "TORCH_MLA"), (40, "TWIN_MLA")):
        problem = random_mla_problem(1, MLA, requests=((1, 300),) * count + ((9, 25),))
        metadata = group.build(common_of(problem))
        assert ran(metadata) == [("decode", name), ("prefill", "TORCH_MLA")]
        step = problem.step
        assert step.kv_cache is not None
        layer = MLAAttention(group, problem.kv_b_proj)
        output = layer(problem.query, step.key, step.value, step.kv_cache.clone(), metadata)
        assert relative_error(output, problem.reference()[0]).norm < 6e-3  # the rounding of bfloat16
    assert ran(group.build_for_cudagraph_capture(make_batch([(1, 1)] * 64))) == [("decode", "TWIN_MLA")]


def test_mla_prefills_go_to_who_can_merge_chunks(make_batch: Any) -> None:
    """A prefill with cached context is merged by its LSE: who returns none would take that away."""
    big = make_batch([(128, 2000)] * 3)
    for returns_lse, name in ((True, "TWIN_MLA"), (False, "TORCH_MLA")):
        selection = mla_selection(MLA.phases, "4q1s64,q32", returns_lse)
        assert selection.selected == {"prefill": "TORCH_MLA", "decode": "TORCH_MLA"}
        group = attention_group(selection, capacity=CAPACITY, dispatch="measured")
        assert ran(group.build(big)) == [("prefill", name)]
        assert ("TWIN_MLA returns no LSE, as TORCH_MLA does" in group.explain()) is not returns_lse


def test_torch_backends_take_turns_and_a_selection_travels(make_batch: Any, tmp_path: Path) -> None:
    """From a file of measurements to the layer, with the backends that a CPU has; a pickled selection chooses alike."""
    registry, path = load_plugins(), tmp_path / "cpu.jsonl"
    for name, times in (("TORCH_SDPA", FEW), ("FLEX_ATTENTION", MANY)):
        kernels: dict[Phase, str] = {
            phase: plan_of(registry.specs[name], CONFIG, "cpu", phase=phase).kernel_name or ""
            for phase in CONFIG.phases
        }
        append_measurements(path, measured(name, times, kernels, CONFIG, (*DECODES, *PREFILLS, *MIXED)))
    fit_file(path)
    selection = select(CONFIG, "cpu", workload=WORKLOAD, measurements=path)
    groups = [
        attention_group(each, capacity=CAPACITY, dispatch="measured")
        for each in (selection, pickle.loads(pickle.dumps(selection)))
    ]
    for requests, name in ([[(1, 30), (1, 41)], "TORCH_SDPA"], [[(1, 1200), (1, 1800)], "FLEX_ATTENTION"]):
        for group in groups:
            problem = random_problem(2, CONFIG, group.kv_layout, requests=requests)
            metadata = group.build(common_of(problem))
            assert [part.backend for part in metadata.parts] == [name]
            assert problem.kv_cache is not None
            output = Attention(group)(problem.query, problem.key, problem.value, problem.kv_cache.clone(), metadata)
            assert relative_error(output, problem.reference()[0]).row < 1e-5
