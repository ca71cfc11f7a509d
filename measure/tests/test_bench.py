"""``attn-select bench`` on a CPU: what it times and prints, and what happens when something stops it."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="timing a layer needs torch")

from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import lookup
from attn_select.reference import timed_steps
from attn_select.runtime import ContextParallel
from attn_select.testing.ranks import run_ranks
from attn_select.times.batch_shape import parse_batch_shape
from attn_select_measure import bench_machine, benching, host_memory, prepared
from attn_select_measure.timed import Timed
from attn_select_torch.runtime import sdpa

pytestmark = [
    pytest.mark.skipif(benching.torch.cuda.is_available(), reason="pinned to what a CPU selects"),
    pytest.mark.usefixtures("known_machine", "quick"),
]

LAYER = ("--num-heads", "4", "--num-kv-heads", "2", "--head-size", "32")
MLA = ("--mla", "--num-heads", "2", "--kv-lora-rank", "32", "--qk-rope-head-dim", "16", "--qk-nope-head-dim", "16")
CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32)
ONE = ("--backend", "TORCH_SDPA")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(benching, "MOST_ROUNDS", 3)
    monkeypatch.setattr(benching, "SETTLED", 0.0)


def test_every_valid_backend_is_timed_and_compared(run: Any) -> None:
    result = run("bench", *LAYER, "--workload", "2q1s40*0.75,1q16_2q1s30*0.25", "--json")
    assert result.code == 0
    data = result.json
    assert data["ok"]
    assert data["complete"]
    assert data["workload"]["shapes"] == [
        {"batch": "2q1s40", "weight": 0.75},
        {"batch": "q16_2q1s30", "weight": 0.25},
    ]
    (layer,) = data["layers"]
    decode, mixed = layer["batches"]
    assert {each["backend"] for each in decode["backends"]} == {"TORCH_SDPA", "FLEX_ATTENTION"}
    assert {phase for each in mixed["backends"] for phase in each["kernel"]} == {"prefill", "decode"}
    for batch in layer["batches"]:
        assert batch["roofline_us"] > 0
        assert [each["time_us"] for each in batch["backends"]] == sorted(each["time_us"] for each in batch["backends"])
        for each in batch["backends"]:
            assert each["failure"] is None
            assert each["method"] == "eager"
            assert each["rounds"] == 3
            assert 0 < each["eager"]["host_us"] <= each["eager"]["wall_us"]
            assert each["spread_us"][0] <= each["time_us"] <= each["spread_us"][1]
            assert 0 < each["error"] <= each["bound"]
            assert each["roofline_share"] == pytest.approx(batch["roofline_us"] / each["time_us"], rel=1e-3)


@pytest.mark.parametrize(
    ("layer", "workload", "kernels"),
    [
        (("--kv-cache-dtype", "fp8"), "2q1s20,q9s20", ["decode", "prefill"]),
        (("--sliding-window", "9", "--sinks"), "2q1s20", ["decode"]),
        (("--alibi", "--soft-cap", "30", "--dtype", "float32"), "q20", ["prefill"]),
        (("--speculative-tokens", "3"), "2q4s20", ["decode"]),
        (("--attn-type", "encoder_only"), "2q20", ["prefill"]),
        (("--block-size", "32", "--v-head-size", "16"), "q5s70", ["prefill"]),
    ],
)
def test_every_kind_of_layer_is_right(run: Any, layer: tuple[str, ...], workload: str, kernels: list[str]) -> None:
    data = run("bench", *LAYER, *layer, "--workload", workload, *ONE, "--json").json
    assert data["ok"], data
    batches = data["layers"][0]["batches"]
    assert [each["kernel"].keys() for batch in batches for each in batch["backends"]] == [{name} for name in kernels]
    assert all(each["error"] > 0 for batch in batches for each in batch["backends"])


def test_what_does_not_fit_in_memory_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = "1q1s64k"  # 65536 tokens of 2 heads, 32 wide, twice in bfloat16: 16 MiB
    monkeypatch.setattr(benching, "SPARE_HOST_BYTES", 1 << 20)
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 30 << 20)
    result = run("bench", *LAYER, "--workload", batch, *ONE)
    assert result.code == 1
    assert "the batch's cache, a copy of it, and weights take 32 MiB for one layer" in result.out
    assert "30 MiB of this machine's memory are free, and 1 MiB of it stay spare" in result.out
    monkeypatch.setattr(host_memory, "free_bytes", lambda: 40 << 20)
    result = run("bench", *LAYER, "--workload", batch, *ONE)
    assert "TORCH_SDPA was not compared: the oracle takes 192 MiB, and 40 MiB of this machine's memory" in result.out


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_mla_is_timed_by_both_of_its_paths(run: Any, dtype: str) -> None:
    workload = "2q1s40,2q9s40_q1s30,q20"
    data = run("bench", *MLA, "--kv-cache-dtype", dtype, "--workload", workload, "--json").json
    assert data["ok"], data
    kernels = [batch["backends"][0]["kernel"] for batch in data["layers"][0]["batches"]]
    assert [set(kernel) for kernel in kernels] == [{"decode"}, {"prefill", "decode"}, {"prefill"}]


def test_a_backend_that_is_not_valid_says_why(run: Any) -> None:
    options = ("--workload", "2q1s40")
    result = run("bench", *LAYER, *options, "--backend", "FLASH_ATTN", "--backend", "TORCH_SDPA")
    assert result.code == 0
    assert "FLASH_ATTN: not valid for decode: device cpu" in result.out
    result = run("bench", *LAYER, *options, "--backend", "FLASH_ATTN")
    assert result.code == 1
    result = run("bench", *LAYER, *options, "--backend", "FLASH_ATTEN")
    assert result.code == 2
    assert "did you mean FLASH_ATTN" in result.err


def test_a_candidate_that_fails_does_not_stop_the_rest(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the kernel is broken\nand says more")

    monkeypatch.setattr(sdpa.SDPAImpl, "forward", broken)
    result = run("bench", *LAYER, "--workload", "2q1s40")
    assert result.code == 0
    assert "TORCH_SDPA: RuntimeError: the kernel is broken\n" in result.out
    assert "FLEX_ATTENTION  flex-cpp" in result.out


def test_a_wrong_result_has_no_time(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_steps.AttentionStep, "error", lambda self: 0.5)
    result = run("bench", *LAYER, "--workload", "2q1s40", *ONE, "--json")
    assert result.code == 1
    (timed,) = result.json["layers"][0]["batches"][0]["backends"]
    assert timed["failure"].startswith("wrong: a relative error of 0.5, above its bound of")
    assert (timed["time_us"], timed["error"], result.json["ok"]) == (None, 0.5, False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore SIGINT, and the tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_the_batches_that_were_timed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, begun = benching.timed_rounds, []

    def interrupted(*arguments: Any) -> Iterator[Any]:
        begun.append(1)
        for number, found in enumerate(rounds(*arguments)):
            if number == 2 and len(begun) % 2 == 0:
                os.kill(os.getpid(), signal.SIGINT)
            yield found

    monkeypatch.setattr(benching, "timed_rounds", interrupted)
    options = ("--workload", "2q1s40,q16", *ONE)
    result = run("bench", *LAYER, *options)
    assert result.code == 130
    assert "interrupted" in result.out
    assert "2q1s40" in result.out
    assert "torch-sdpa" in result.out
    data = run("bench", *LAYER, *options, "--json").json
    assert not data["complete"]
    (batch,) = data["layers"][0]["batches"]
    assert batch["batch"] == "2q1s40"


@pytest.mark.parametrize(("settled", "seconds", "rounds"), [(0.0, 1e9, 9), (1e9, 1e9, 4), (0.0, 1e-9, 4)])
def test_rounds_end_when_medians_are_sure_or_time_is_up(
    run: Any, monkeypatch: pytest.MonkeyPatch, settled: float, seconds: float, rounds: int
) -> None:
    for name, value in (("LEAST_ROUNDS", 4), ("MOST_ROUNDS", 9), ("SETTLED", settled)):
        monkeypatch.setattr(benching, name, value)
    data = run("bench", *LAYER, "--workload", "2q1s40", "--seconds", str(seconds), *ONE, "--json").json
    assert data["layers"][0]["batches"][0]["backends"][0]["rounds"] == rounds


def test_layers_of_more_ranks_than_processes_are_not_timed(run: Any) -> None:
    result = run("bench", *LAYER, "--dcp", "2", "--workload", "2q1s40", *ONE)
    assert result.code == 1
    text = "not timed: its cache lies on 2 ranks (--dcp 2), but 1 process was started: see torchrun"
    assert text in " ".join(result.out.split())


def test_candidates_of_a_decode_are_made_for_decode_alone_where_prefill_is_not_theirs() -> None:
    """On an assumed GPU: FLASHMLA decodes and does not prefill, so mixed batches are another's, too."""
    bench = object.__new__(benching.Bench)
    bench.machine, bench.rules, bench.environment = SimpleNamespace(device=lookup("h100")), None, None
    config = AttentionConfig(num_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    decode = {each.name: each for each in bench.candidates(config, parse_batch_shape("4q1s1k"))}
    assert decode["FLASHMLA"].phases == ("decode",)
    assert decode["FLASH_ATTN_MLA"].phases is None
    assert "CUTLASS_MLA" not in decode
    mixed = {each.name: each for each in bench.candidates(config, parse_batch_shape("q512_4q1s1k"))}
    pair = mixed["FLASH_ATTN_MLA + FLASHMLA"]
    assert pair.selection is not None
    assert pair.selection.selected == {"prefill": "FLASH_ATTN_MLA", "decode": "FLASHMLA"}
    assert pair.phases is None
    assert mixed["FLASH_ATTN_MLA"].failure is None
    asked = {each.name for each in bench.candidates(config, parse_batch_shape("q512_4q1s1k"), ["FLASHMLA"])}
    assert asked == {"FLASH_ATTN_MLA + FLASHMLA"}
    prefill = {each.name: each for each in bench.candidates(config, parse_batch_shape("q512"))}
    assert "FLASHMLA" not in prefill
    (alone,) = bench.candidates(config, parse_batch_shape("q512"), ["FLASHMLA"])
    assert str(alone.failure).startswith("not valid for prefill: ")


class FakeGraph:
    """Replays what was captured by calling it again."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self.calls = weakref.WeakSet(calls)
        self.count = len(calls)
        self.caches = {call.args[3].data_ptr() for call in calls}
        self.last = weakref.ref(calls[-1])

    def replay(self) -> None:
        last = self.last()
        assert last is not None, "the graph reads metadata that nobody owns any more"
        last()


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bench that takes the CPU for a GPU of 16 GiB with an L2 of 1 MiB, whose copies reach 1 TB/s."""
    bench: Any = benching.Bench()
    bench.machine.on_gpu, bench.rates = True, bench_machine.Rates(1e12, 1e14)
    cuda = benching.torch.cuda
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (16 << 30, 16 << 30))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 20))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(cuda, name, lambda *_: None)
    monkeypatch.setattr(prepared, "LONGEST_US", 1e9)  # what a CPU needs says nothing here
    bench.graphs = []

    def captured(calls: Sequence[Any]) -> FakeGraph:
        bench.graphs.append(FakeGraph(calls))
        return bench.graphs[-1]

    monkeypatch.setattr(prepared, "captured", captured)
    return bench


def timed_by(bench: Any, config: AttentionConfig, text: str, backend: str) -> Timed:
    batch = parse_batch_shape(text)
    (timed,) = bench.measure(config, batch, bench.candidates(config, batch, [backend])).timed
    return timed


@pytest.mark.parametrize("text", ["q512", "2q128s256"])
def test_a_graph_runs_as_many_layers_as_keep_l2_cold(gpu_bench: Any, text: str) -> None:
    config = AttentionConfig(num_heads=2, num_kv_heads=1, head_size=32)
    batch = parse_batch_shape(text)
    found = gpu_bench.measure(config, batch, gpu_bench.candidates(config, batch, ["TORCH_SDPA"]))
    (timed,), (graph,) = found.timed, gpu_bench.graphs
    assert (timed.failure, timed.method) == (None, "graph")
    assert timed.error is not None
    assert timed.exact
    cache = 512 * 2 * 32 * 2
    assert (len(graph.caches) - 1) * cache >= 3 << 20
    assert (len(graph.caches) - 2) * cache < 3 << 20
    assert graph.count % len(graph.caches) == 0
    wanted = min(benching.MOST_LAYERS, round(benching.LEAST_US / found.roofline_us))
    assert wanted <= graph.count < wanted + len(graph.caches)


def test_a_backend_that_is_far_slower_than_the_roofline_runs_fewer_layers(
    gpu_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AttentionConfig(num_heads=2, num_kv_heads=1, head_size=32)
    monkeypatch.setattr(prepared, "LONGEST_US", 1.0)
    made = benching.CacheMemory.caches

    def caches(memory: Any, step: Any) -> list[Any]:
        *others, last = made(memory, step)
        for other in others:  # as other backends' new tokens in other layouts leave them
            other.zero_()
        return [*others, last]

    monkeypatch.setattr(benching.CacheMemory, "caches", caches)
    timed = timed_by(gpu_bench, config, "2q128s256", "TORCH_SDPA")
    assert (timed.failure, timed.method) == (None, "graph")
    assert timed.exact  # what is compared ran on the cache that it is compared on
    (graph,) = gpu_bench.graphs
    assert graph.count == 1


def test_ranks_run_as_many_layers_whatever_each_of_them_measures(
    gpu_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each layer of a graph has collectives, in which ranks wait for each other.
    config, batch = CONFIG.model_copy(update={"decode_context_parallel_size": 2}), parse_batch_shape("8q1s512")
    counts, prepare = list[int](), prepared.Prepared.prepare

    def counted(each: Any, memory: Any, layers: int) -> None:
        prepare(each, memory, layers)
        counts.append(len(each.layers))

    def measure(collectives: Any) -> str | None:
        bench = benching.Bench(ranks=ContextParallel(collectives))
        bench.machine.on_gpu, bench.rates = True, bench_machine.Rates((1 + collectives.rank) * 1e10, 1e14)
        (timed,) = bench.measure(config, batch, bench.candidates(config, batch, ["TORCH_SDPA"])).timed
        return timed.failure

    monkeypatch.setattr(prepared.Prepared, "prepare", counted)
    monkeypatch.setattr(prepared, "LONGEST_US", 1.0)  # each rank's own time says nothing of how many layers all run
    assert run_ranks(2, measure) == [None, None]
    assert len(counts) == 2
    assert counts[0] == counts[1] > 1
