"""FLASHINFER_MLA's native decode: plans on host data, page indices, graphs, causal tiles, one scale per kind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from attn_select.reference.running import impl_of
from attn_select.runtime import Outputs

pytest.importorskip("torch")

import flashinfer_emulated as fi
import flashinfer_mla_groups as layers
import torch

from attn_select.errors import ConfigError
from attn_select.machine.environment import Environment
from attn_select.reference.oracle import attention_reference
from attn_select.reference.running import common_of
from attn_select.runtime import BatchError, Capacity
from attn_select.runtime.cuda_graph import CudaGraphRunner
from attn_select.testing import error_bound, relative_error
from attn_select_flashinfer.runtime import plans

Emulate = Callable[..., Any]
WRAPPER = "BatchMLAPagedAttentionWrapper"
PLAN, RUN = f"{WRAPPER}.plan", f"{WRAPPER}.run"
RANK, ROPE = 512, 64
KERNELS = pytest.mark.parametrize(
    ("gpu", "capability", "options", "backend"),
    [
        ("h100", (9, 0), {}, "fa3"),
        ("h100", (9, 0), {"decode_kernel": "fa2"}, "fa2"),
        ("a100", (8, 0), {}, "fa2"),
        ("rtx5090", (12, 0), {}, "fa2"),
    ],
)


@pytest.fixture(params=fi.RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def of_release(emulate: Emulate, release: str) -> Emulate:
    """``emulate`` as in ``conftest``, once per release."""
    return functools.partial(emulate, release=release)


def on_gpu(kernel: str, **fields: Any) -> Any:
    """Return a group of the real kernels for decode, or skip."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs fa3: compute capability 9.x")
    options = {name: fields.pop(name) for name in ("cuda_graphs", "capacity") if name in fields}
    made = {"device": "cuda", "stated": {"environment": Environment()}, "phases": ["decode"], "decode_kernel": kernel}
    return layers.group_for("h100", layers.mla_config(**fields), **made, **options)


@KERNELS
@pytest.mark.parametrize("block_size", [1, 48])
def test_decodes_of_several_lengths(
    gpu: str, capability: Any, options: Any, backend: str, block_size: int, emulate: Emulate
) -> None:
    world = emulate(capability)
    config = layers.mla_config(block_size=block_size, num_speculative_tokens=2)
    group = layers.group_for(gpu, config, phases=["decode"], **options)
    problem = layers.problem_for(group, [(1, 70), (3, 3), (2, 129), (1, 0)], nan_tails=True)
    fi.on_device(problem.block_table, problem.seq_lens, problem.query_start_loc)
    layers.run(group, problem)
    (made,) = world.named(f"{WRAPPER}.__init__")
    (plan,) = world.named(PLAN)
    assert made["backend"] == backend
    assert not world.syncs
    assert (plan["page_size"], plan["causal"]) == (group.kernel_block_size, True)
    ratio = block_size // plan["page_size"]
    for request, length in enumerate((70, 3, 129, 0)):
        blocks = problem.block_table[request, : -(-length // block_size)].tolist()
        wanted = [block * ratio + part for block in blocks for part in range(ratio)]
        first, wanted = int(plan["kv_indptr"][request]), wanted[: -(-length // plan["page_size"])]
        assert plan["kv_indices"][first : first + len(wanted)].tolist() == wanted


def test_a_part_of_a_table_is_read_up_to_the_last_keys(of_release: Emulate) -> None:
    of_release()
    group = layers.group_for("h100", layers.mla_config(), phases=["decode"])
    problem = layers.problem_for(group, [(1, 70), (1, 200), (1, 1)])
    wide = torch.empty(3, 10, dtype=torch.int32)
    for part in (wide[:, 5:], wide[:, :5]):
        wide.fill_(1 << 30)
        part[:, : problem.block_table.shape[1]] = problem.block_table
        drawn = dataclasses.replace(problem, block_table=part)
        layers.run(group, drawn, metadata=group.build(common_of(drawn)))


def test_query_and_cache_are_views(of_release: Emulate, release: str) -> None:
    world = of_release()
    group = layers.group_for("h100", layers.mla_config(), phases=["decode"])
    problem = layers.problem_for(group, [(1, 9), (1, 65)])
    served = group.backends["decode"]
    impl = impl_of(served, scale=0.1)
    query, output = torch.randn(2, 4, RANK + ROPE).bfloat16(), torch.empty(2, 4, RANK).bfloat16()
    metadata = served.builder.build(0, layers.common_of(problem))
    for cache in (problem.kv_cache, problem.kv_cache.clone()):
        impl.forward_mqa(query, cache, metadata, Outputs(output))
        (call,) = world.named(RUN)[-1:]
        assert call["q_nope"].data_ptr() == query.data_ptr()
        assert call["q_pe"].data_ptr() == query[..., RANK:].data_ptr()
        assert call["ckv_cache"].data_ptr() == cache.data_ptr()
        assert call["kpe_cache"].data_ptr() == cache[..., RANK:].data_ptr()
        assert call["out"] is output
        assert call["return_lse"] == (release != "0.6.14")  # what a plan of 0.7 declares, each call must do
    assert impl.takes_query_parts
    latent, rope = (
        torch.randn(4, 3, RANK).bfloat16().transpose(0, 1),
        torch.randn(3, 4, 2 * ROPE).bfloat16()[..., ROPE:],
    )
    wanted, cache = torch.empty_like(output), torch.randn_like(problem.kv_cache)
    impl.forward_mqa(torch.cat((latent, rope), -1)[:2], cache, metadata, Outputs(wanted))
    impl.forward_mqa((latent, rope), cache, metadata, Outputs(output))  # padded, as in a graph
    assert torch.equal(output, wanted)
    assert world.named(RUN)[-1]["q_nope"].data_ptr() == latent.data_ptr()


@pytest.mark.parametrize("heads", [40, 24])
def test_a_query_that_a_tile_cuts_in_two_is_a_request(heads: int, emulate: Emulate) -> None:
    world = emulate()
    config = layers.mla_config(num_heads=heads, num_speculative_tokens=7)
    group = layers.group_for("h100", config, phases=["decode"])
    # The first tile ends in query 128 // heads, which sees one key more than its loop reads: the first of a new tile.
    cut = 128 // heads
    requests = [(8, 64 + 8 - cut), (8, 100), (3, 5), (1, 0)]
    layers.run(group, layers.problem_for(group, requests))
    (plan,) = world.named(PLAN)
    assert plan["qo_indptr"].tolist() == list(range(21))
    assert plan["kv_len_arr"][:8].tolist() == list(range(65 - cut, 73 - cut))
    assert not plan["causal"]


def test_as_many_tokens_as_requests_are_requests_of_their_own_pages(of_release: Emulate) -> None:
    """A request without a query makes room for another's second one."""
    of_release()
    group = layers.group_for("h100", layers.mla_config(num_heads=40, num_speculative_tokens=3), phases=["decode"])
    layers.run(group, layers.problem_for(group, [(4, 70), (0, 9), (0, 40), (1, 64), (0, 3)]))


def test_padding_behind_requests_of_one_query_is_nobodys(emulate: Emulate) -> None:
    world = emulate()
    group = layers.group_for("h100", layers.mla_config(num_heads=40, num_speculative_tokens=3), phases=["decode"])
    common = common_of(layers.problem_for(group, [(4, 70), (2, 9)]))
    slots = torch.cat([common.slot_mapping, torch.tensor([-1, -1])])
    group.build(dataclasses.replace(common, num_actual_tokens=8, slot_mapping=slots))
    (plan,) = world.named(PLAN)
    assert plan["qo_indptr"].tolist() == list(range(7))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_query_that_fits_its_tiles_is_not_split(heads: int, emulate: Emulate) -> None:
    world = emulate()
    config = layers.mla_config(num_heads=heads, num_speculative_tokens=3)
    group = layers.group_for("h100", config, phases=["decode"])
    layers.run(group, layers.problem_for(group, [(4, 65), (2, 66), (1, 130)]))
    assert [plan["qo_indptr"].tolist() for plan in world.named(PLAN)] == [[0, 4, 6, 7]]


def test_layers_that_are_not_causal(emulate: Emulate) -> None:
    world = emulate()
    group = layers.group_for("h100", layers.mla_config(num_heads=40, non_causal=True, num_speculative_tokens=7))
    layers.run(group, layers.problem_for(group, [(8, 70), (1, 9), (20, 40)]))
    (plan,) = world.named(PLAN)
    assert (plan["qo_indptr"].tolist(), plan["causal"]) == ([0, 8, 9], False)


def test_a_layers_own_scale_is_planned_once(of_release: Emulate, release: str) -> None:
    world = of_release()
    group = layers.group_for("h100", layers.mla_config())
    problem = layers.problem_for(group, [(1, 70), (20, 90)])
    problem = dataclasses.replace(problem, scale=0.05)
    for _ in range(2):
        layers.run(group, problem)
    default, own = 192**-0.5, 0.05
    # FlashInfer's plan is asked once where the schedule is our own.
    planned = [default] if release == "0.6.14" else [default, own, own]
    assert [plan["sm_scale"] for plan in world.named(PLAN)] == planned
    if release == "0.6.14":
        assert [run["sm_scale"] for run in world.named(RUN)] == [own, own]
    # Own tokens and two chunks of context: planned, planned again as the layer runs them, and the next step's.
    ragged = world.named("BatchPrefillWithRaggedKVCacheWrapper.plan")
    assert [plan["sm_scale"] for plan in ragged] == [default] * 3 + [own] * 6
    metadata = group.build(layers.common_of(problem))
    layers.run(group, problem, metadata=metadata)
    with pytest.raises(ConfigError, match=r"the softmax scales 0\.05 and 0\.2; a plan serves one scale"):
        layers.run(group, problem, layers.layer_of(group, problem, scale=0.2), metadata)


@KERNELS
def test_masked_keys_are_far_away_with_a_small_scale_too(
    gpu: str, capability: Any, options: Any, backend: str, emulate: Emulate
) -> None:
    world = emulate(capability)
    group = layers.group_for(gpu, layers.mla_config(num_speculative_tokens=2), **options)
    problem = layers.problem_for(group, [(3, 70), (1, 5), (20, 90)])
    problem = dataclasses.replace(problem, scale=1e-4)
    layers.run(group, problem)
    for entry in (PLAN, "BatchPrefillWithRaggedKVCacheWrapper.plan"):
        assert world.named(entry)[-1]["sm_scale"] == 1e-4 * 32


def test_the_scale_of_an_fp8_cache_multiplies_no_scores(emulate: Emulate) -> None:
    """However small, it leaves the mask and the query alone."""
    world = emulate()
    group = layers.group_for("h100", layers.mla_config(kv_cache_dtype="fp8"), phases=["decode"])
    problem = layers.problem_for(group, [(1, 70), (1, 5)])
    layers.run(group, dataclasses.replace(problem, k_scale=torch.tensor(1e-4)))
    (call,) = world.named(RUN)
    assert call["ckv_scale"] == call["kpe_scale"] == pytest.approx(1e-4)


@pytest.mark.parametrize("kernel", ["fa3", "fa2"])
def test_several_steps_may_be_built_before_the_first_one_runs(kernel: str, emulate: Emulate) -> None:
    emulate()
    options = {"decode_kernel": kernel, "prefill_kernel": kernel}
    group = layers.group_for("h100", layers.mla_config(), **options)
    problems = [layers.problem_for(group, lens) for lens in ([(1, 70), (9, 9)], [(1, 9), (1, 8), (5, 30)], [(1, 3)])]
    steps = [(problem, group.build(layers.common_of(problem))) for problem in problems]
    for problem, metadata in (*steps, *reversed(steps)):
        layers.run(group, problem, metadata=metadata)


def test_a_step_is_refused_whose_buffers_a_later_graph_step_has_overwritten(emulate: Emulate) -> None:
    emulate()
    group = layers.group_for("h100", layers.mla_config(), cuda_graphs=True, phases=["decode"])
    builder = group.backends["decode"].builder
    eager, two, other = (layers.problem_for(group, lens) for lens in ([(1, 9)], [(1, 70), (1, 5)], [(1, 3), (1, 4)]))
    builder.build_for_cudagraph_capture(layers.common_of(two))
    early, late = group.build(layers.common_of(eager)), group.build(layers.common_of(two))
    with pytest.raises(BatchError, match="a later build has planned a CUDA graph in the buffer"):
        layers.run(group, eager, metadata=early)
    group.build(layers.common_of(other))
    with pytest.raises(BatchError, match="built for a CUDA graph, and a later build has overwritten the lists"):
        layers.run(group, two, metadata=late)
    layers.run(group, eager)


def test_a_capacity_that_overflows_a_schedule(emulate: Emulate) -> None:
    emulate()
    config = layers.mla_config(num_heads=128, num_speculative_tokens=63)
    with pytest.raises(ConfigError, match="pieces of work; 16384 fit"):
        layers.group_for("h100", config, capacity=Capacity(512, 32768, 4096))
    layers.group_for("h100", config, capacity=Capacity(128, 8192, 4096))


@pytest.mark.parametrize(("query_len", "heads"), [(1, 4), (3, 4), (5, 40)])
def test_a_graph_replays_with_other_lengths_and_pages(query_len: int, heads: int, of_release: Emulate) -> None:
    world = of_release()
    config = layers.mla_config(num_heads=heads, num_speculative_tokens=query_len - 1)
    group = layers.group_for("h100", config, cuda_graphs=True, phases=["decode"])
    served = group.backends["decode"]
    impl = impl_of(served, scale=0.1)
    problems = [
        layers.problem_for(group, [(query_len, length) for length in lengths], seed)
        for seed, lengths in enumerate(([9, 9, 9], [70, 5, 0], [200, 64, 65], [6, 330, 129]))
    ]
    tables = torch.zeros(2, 3, 8, dtype=torch.int32)
    cache, query = torch.zeros(64, 64, 576).bfloat16(), torch.randn(3 * query_len, heads, 576).bfloat16()
    output, lse = torch.empty(3 * query_len, heads, RANK).bfloat16(), torch.empty(3 * query_len, heads)

    def common(problem: Any, place: int = 0) -> Any:
        table = problem.block_table
        tables[place, :, : table.shape[1]] = table
        return layers.common_of(problem, block_table_tensor=tables[place])

    for _ in range(2):  # the first learns the layer's scale, as a runner's warm-up does
        metadata = served.builder.build_for_cudagraph_capture(common(problems[0]))
        impl.forward_mqa(query, cache, metadata, Outputs(output, lse))
    with fi.capturing() as graph:
        impl.forward_mqa(query, cache, metadata, Outputs(output, lse))
    assert len(graph.nodes) == 1
    for place, problem in enumerate(problems[1:]):
        cache[: len(problem.kv_cache)] = problem.kv_cache.nan_to_num()
        batch = common(problem, place % 2)
        served.builder.build(0, batch)
        graph.replay()
        for request, (_, length) in enumerate(problem.requests):
            rows = slice(request * query_len, (request + 1) * query_len)
            pages = batch.block_table_tensor[request, : -(-length // 64)].long()
            keys = cache[pages].flatten(0, 1)[:length, None]
            wanted, wanted_lse = attention_reference(query[rows], keys, keys[..., :RANK], scale=0.1)
            torch.testing.assert_close(output[rows].double(), wanted, atol=2e-2, rtol=0)
            torch.testing.assert_close(lse[rows].double(), wanted_lse, atol=2e-3, rtol=0)
    captured = [made for made in world.named(f"{WRAPPER}.__init__") if made["use_cuda_graph"]]
    assert len(captured) == 1


def test_steps_planned_ahead_of_the_device(emulate: Emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate()
    monkeypatch.setattr(plans, "new_event", lambda device: fi.Event())
    group = layers.group_for("h100", layers.mla_config(), phases=["decode"])
    served = group.backends["decode"]
    impl = impl_of(served, scale=192**-0.5)
    problems = [layers.problem_for(group, [(1, 20 * step + r) for r in range(1, 4)], step) for step in range(4)]
    query, caches = torch.randn(3, 4, 576).bfloat16(), [each.kv_cache.nan_to_num() for each in problems]

    def outputs() -> list[torch.Tensor]:
        made = []
        for problem in problems:
            made.append(torch.zeros(3, 4, RANK).bfloat16())
            metadata = served.builder.build(0, layers.common_of(problem))
            impl.forward_mqa(query, caches[len(made) - 1], metadata, Outputs(made[-1]))
        return made

    waited = outputs()
    with fi.lagging():
        found = outputs()
    for one, other in zip(waited, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fa3", "fa2"])
@pytest.mark.parametrize("requests", [[(8, 69)], [(8, 69), (3, 130), (8, 197)]], ids=["one", "several"])
def test_a_query_that_a_tile_cuts_in_two_on_the_gpu(kernel: str, requests: list[tuple[int, int]]) -> None:
    group = on_gpu(kernel, num_heads=40, num_speculative_tokens=7)
    layers.run(group, layers.problem_for(group, requests))


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "cache"), [("fa3", "auto"), ("fa2", "auto"), ("fa3", "fp8")])
@pytest.mark.parametrize("query_len", [1, 3])
def test_replays_for_every_size_of_a_list(kernel: str, cache: str, query_len: int) -> None:
    fields = {"num_heads": 16, "kv_cache_dtype": cache, "num_speculative_tokens": query_len - 1}
    group = on_gpu(kernel, cuda_graphs=True, capacity=Capacity(32, 128, 512), **fields)
    # Of one seed, and so with the same weights.
    lengths = [[3 + (37 * r + 111 * other) % 400 for r in range(32)] for other in range(2)]
    problems = [layers.problem_for(group, [(query_len, length) for length in each]) for each in lengths]
    layer = layers.layer_of(group, problems[0])
    held = max((problem.kv_cache for problem in problems), key=len).clone()
    inputs = {"query": problems[0].query, "key": problems[0].key, "value": problems[0].value}

    def step(given: Any, metadata: Any) -> torch.Tensor:
        output = torch.empty(len(given["query"]), 16, 128, dtype=torch.bfloat16, device="cuda")
        return layer(given["query"], given["key"], given["value"], held, metadata[group], output)

    runner = CudaGraphRunner(step, [group], inputs, [1, 2, 4, 8, 16, 32], query_len=query_len)
    runner.capture()
    for size in (1, 2, 3, 8, 13, 32):
        for problem in problems:
            part = problem.part(0, size)
            held[: len(part.kv_cache)].copy_(part.kv_cache)
            given = {"query": part.query, "key": part.key, "value": part.value}
            output = runner(given, {group: layers.common_of(part)})
            wanted, _ = part.reference(kv_cache=held, longest_decode=query_len)
            plans = {"decode": group.backends["decode"].context.plans["decode"]}
            assert relative_error(output.cpu(), wanted.cpu()).norm <= error_bound(group.config, plans).norm


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 30, 200])
@pytest.mark.parametrize("heads", [16, 128])
def test_decodes_of_uneven_lengths_on_the_gpu(heads: int, requests: int) -> None:
    group = on_gpu("fa3", num_heads=heads, capacity=Capacity(200, 200, 8192))
    lengths = [(1, 5000 * (number % 17) // (16 + number) + number % 3) for number in range(1, requests + 1)]
    layers.run(group, layers.problem_for(group, lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fa3", "fa2"])
def test_steps_built_before_the_first_one_runs_on_the_gpu(kernel: str) -> None:
    group = on_gpu(kernel, num_heads=16, num_speculative_tokens=2)
    lengths = ([(1, 300), (3, 9)], [(2, 9), (1, 8), (3, 130)], [(1, 3)])
    problems = [layers.problem_for(group, each) for each in lengths]
    steps = [(problem, group.build(layers.common_of(problem))) for problem in problems]
    for problem, metadata in (*steps, *reversed(steps), *steps):
        layers.run(group, problem, metadata=metadata)
