"""attn-select's kernels behind SGLang's interface of backends, on its own pools, against float64 attention.

Runs where SGLang is installed (``make test-engines``). Pools and layers are SGLang's, the batches are drawn.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_on_cpu
import torch
import triton_interpreter  # noqa: F401
from torch import Tensor
from torch.nn.functional import pad

from attn_select import AttentionConfig, ConfigError, Selection
from attn_select.backends.registry import load_plugins
from attn_select.runtime import BatchError
from attn_select.runtime.cuda_graph import StaticBatch
from attn_select.testing import selection_of

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning:sglang.*", "ignore::DeprecationWarning"),
]

HEADS, KV_HEADS, SIZE = 4, 2, 32
REQUESTS, CONTEXT, SLOTS = 6, 96, 512
WINDOWS = (None, 20)
sglang_on_cpu.define_operations()
triton = pytest.param(
    "TRITON_ATTN",
    marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HEADS * SIZE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 2,
}


def server_args() -> SimpleNamespace:
    """Return the arguments of SGLang that the adapter reads, as they are by default, with prompts in one piece."""
    return SimpleNamespace(
        chunked_prefill_size=-1,
        max_prefill_tokens=64,
        disable_cuda_graph=True,
        cuda_graph_config=None,
        attn_cp_size=1,
        dcp_size=1,
        enable_two_batch_overlap=False,
        speculative_num_draft_tokens=4,
    )


def attention(query: Tensor, keys: Tensor, values: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    """Causal attention of a request's last tokens in float64, ``(T, heads * size)``."""
    keys, values = (t.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (keys, values))
    scores = torch.einsum("thd,shd->hts", query.double(), keys) * SIZE**-0.5
    distance = torch.arange(len(keys) - len(query), len(keys))[:, None] - torch.arange(len(keys))
    hidden = (distance < 0) | (distance >= (window or len(keys)))
    logits = torch.full((HEADS,), -torch.inf) if sinks is None else sinks
    behind = logits.double()[:, None, None].expand(HEADS, len(query), 1)
    weights = torch.cat([scores.masked_fill(hidden, -torch.inf), behind], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hts,shd->thd", weights, values).flatten(1)


class HeldLayer(torch.nn.Module):
    """A layer with sinks, as a model of SGLang's holds one."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attn = layer
        self.sinks = torch.nn.Parameter(torch.randn(HEADS).bfloat16(), requires_grad=False)


class Engine:
    """Two layers, pools of SGLang's and requests that grow: what a scheduler and a model runner keep.

    Args:
        two_pools: the layer with a window has a pool of its own, with its own pages, and of a request only those that
            its next token still sees: the others are NaN, and stand in page 0.
    """

    def __init__(
        self, page_size: int, seed: int, two_pools: bool = False, windows: tuple[int | None, ...] = WINDOWS
    ) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        self.page_size, self.random, self.windows = page_size, random.Random(seed), windows
        torch.manual_seed(seed)
        self.pool: Any
        self.window_pages: list[int] | None = None
        if two_pools:
            self.pool, pools = self._two_pools()
        else:
            self.pool = MHATokenToKVPool(SLOTS, page_size, torch.float32, KV_HEADS, SIZE, len(windows), "cpu", False)
            pools = [self.pool]
        for buffer in (buffer for pool in pools for buffer in (*pool.k_buffer, *pool.v_buffer)):
            buffer.fill_(float("nan"))
            buffer[:page_size] = 1e3 if two_pools else float("nan")
        self.requests = ReqToTokenPool(REQUESTS, CONTEXT, "cpu", False)
        sizes = [-1 if window is None else window - 1 for window in windows]
        self.layers = [
            RadixAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, index, sliding_window_size=size)
            for index, size in enumerate(sizes)
        ]
        self.holders: list[Any] = list(self.layers)
        pages = list(range(1, SLOTS // page_size))
        self.random.shuffle(pages)
        self.pages, self.lens, self.seen_from = pages, [0] * REQUESTS, [0] * REQUESTS
        self.seen = [[torch.empty(0, 2 * KV_HEADS, SIZE) for _ in range(REQUESTS)] for _ in windows]
        self.runner = SimpleNamespace(
            model=torch.nn.ModuleList(self.layers),
            model_config=SimpleNamespace(hf_config=dict(LLAMA), context_len=CONTEXT),
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.requests,
            page_size=page_size,
            device="cpu",
            dtype=torch.float32,
            use_mla_backend=False,
            spec_algorithm=SimpleNamespace(is_none=lambda: True, is_ngram=lambda: False),
            server_args=server_args(),
        )

    def _two_pools(self) -> tuple[Any, list[Any]]:
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        sizes = {"page_size": self.page_size, "head_num": KV_HEADS, "head_dim": SIZE, "device": "cpu"}
        layers: dict[str, list[int]] = {"full_attention_layer_ids": [0], "swa_attention_layer_ids": [1]}
        pool = SWAKVPool(size=SLOTS, size_swa=SLOTS // 2, dtype=torch.float32, **sizes, **layers)
        pool.register_mapping(torch.zeros(SLOTS + self.page_size + 1, dtype=torch.int64))
        self.window_pages = list(range(1, SLOTS // 2 // self.page_size))
        self.random.shuffle(self.window_pages)
        return pool, [pool.full_kv_pool, pool.swa_kv_pool]

    def _map(self, request: int) -> None:
        """Map a request's pages into the pool of layers with windows, and free those that no later token sees."""
        if self.window_pages is None:
            return
        page, window = self.page_size, WINDOWS[1] or 0
        mapping, buffers = self.pool.full_to_swa_index_mapping, self.pool.swa_kv_pool
        for start in range(0, self.lens[request], page):
            first = int(self.requests.req_to_token[request + 1, start])
            seen = start + page > self.seen_from[request] - window + 1
            if seen and not mapping[first]:
                mapping[first : first + page] = self.window_pages.pop() * page + torch.arange(page)
            if not seen and mapping[first]:
                freed = mapping[first : first + page].clone()
                self.window_pages.append(int(freed[0]) // page)
                buffers.k_buffer[0][freed] = buffers.v_buffer[0][freed] = float("nan")
                mapping[first : first + page] = 0

    def place(self, request: int, length: int) -> list[int]:
        """Return the slots of a request's next tokens, which it has from now on."""
        row, first = self.requests.req_to_token[request + 1], self.lens[request]
        for position in range(first, first + length):
            if position % self.page_size == 0:
                row[position] = self.pages.pop() * self.page_size
            else:
                row[position] = row[position - 1] + 1
        return [int(slot) for slot in row[first : first + length]]

    def step(self, chosen: list[int], lens: list[int] | None) -> tuple[Any, list[Tensor]]:
        """Return the next step of these requests, decodes where no lengths are given, and its tokens' K and V."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        slots = []
        for request, length in zip(chosen, lens or [1] * len(chosen), strict=True):
            slots += self.place(request, length)
            self.seen_from[request] = self.lens[request]
            self.lens[request] += length
            self._map(request)
        seq_lens = torch.tensor([self.lens[request] for request in chosen])
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if lens is None else ForwardMode.EXTEND,
            batch_size=len(chosen),
            req_pool_indices=torch.tensor(chosen) + 1,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            extend_seq_lens_cpu=lens,
            out_cache_loc=torch.tensor(slots),
        )
        rows = [torch.randn(len(slots), 2 * KV_HEADS, SIZE) for _ in self.windows]
        for seen, row in zip(self.seen, rows, strict=True):
            parts = row.split(lens or [1] * len(chosen))
            for request, part in zip(chosen, parts, strict=True):
                seen[request] = torch.cat([seen[request], part])
        return batch, rows

    def give_sinks(self, index: int) -> None:
        """Let a layer have sinks; the others have none."""
        self.holders[index] = HeldLayer(self.layers[index])
        self.runner.model = torch.nn.ModuleList(self.holders)

    def check(
        self,
        backend: Any,
        batch: Any,
        rows: list[Tensor],
        chosen: list[int],
        lens: list[int] | None,
        fill: int = 0,
    ) -> None:
        """Run every layer of a step and compare each request's rows with float64 attention.

        Args:
            fill: decodes behind them that only fill a captured batch.
        """
        for holder, layer, row, seen, window in zip(
            self.holders, self.layers, rows, self.seen, self.windows, strict=True
        ):
            sinks = getattr(holder, "sinks", None)
            query = torch.randn(len(row) + fill, HEADS * SIZE)
            key, value = torch.cat([row, torch.randn(fill, *row.shape[1:])]).split(KV_HEADS, dim=1)
            output = backend.forward(query, key, value, layer, batch, **({} if sinks is None else {"sinks": sinks}))
            assert output.shape == query.shape
            parts = [tensor[: len(row)].split(lens or [1] * len(chosen)) for tensor in (query, output)]
            for request, asked, given in zip(chosen, *parts, strict=True):
                keys, values = seen[request].split(KV_HEADS, dim=1)
                wanted = attention(asked.view(-1, HEADS, SIZE), keys, values, window, sinks).float()
                torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


def made(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend on a CPU; Triton's as for a GPU, by its interpreter."""
    from attn_select_sglang.kernels import backend
    from attn_select_sglang.registration import made as made_by_name

    if name == "TRITON_ATTN":
        monkeypatch.setattr(backend, "select", emulated)
    return made_by_name(name, engine.runner)


def emulated(config: AttentionConfig, device: Any, rules: Any, *, backend: str, gpu: str = "a100") -> Selection:
    """Stand for ``select`` in the adapter: a plan for a GPU that is not here."""
    return selection_of(load_plugins().specs[backend], config, gpu)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("two_pools", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["TORCH_SDPA", triton])
def test_drawn_steps(name: str, page_size: int, two_pools: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks with history, single tokens between longer ones, and decodes, in any order of requests."""
    if name == "TRITON_ATTN" and page_size == 1:
        pytest.skip("TRITON_ATTN reads pages of 16 tokens and more")
    engine = Engine(page_size, seed, two_pools)
    backend, draw = made(engine, name, monkeypatch), engine.random
    for _ in range(5 if name == "TRITON_ATTN" else 12):
        chosen = draw.sample(range(REQUESTS), draw.randint(1, REQUESTS))
        chosen = [request for request in chosen if engine.lens[request] < CONTEXT - 10] or [0]
        started = all(engine.lens[request] for request in chosen)
        lens = None if started and draw.random() < 0.5 else [draw.choice([1, 1, 3, 9]) for _ in chosen]
        batch, rows = engine.step(chosen, lens)
        backend.init_forward_metadata(batch)
        engine.check(backend, batch, rows, chosen, lens)


@pytest.mark.parametrize("name", ["TORCH_SDPA", triton])
def test_sinks_are_read_where_the_model_keeps_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where new weights are loaded between two steps. One layer has sinks, the other has none."""
    engine = Engine(16, 5)
    engine.give_sinks(1)
    backend = made(engine, name, monkeypatch)
    for lens in ([3, 20, 9], None, [1, 7, 1]):
        batch, rows = engine.step([0, 4, 2], lens)
        backend.init_forward_metadata(batch)
        engine.check(backend, batch, rows, [0, 4, 2], lens)
        engine.holders[1].sinks.copy_(torch.randn(HEADS))
    key, value = rows[1].split(KV_HEADS, dim=1)
    query, (without, with_sinks) = torch.zeros(len(key), HEADS * SIZE), engine.layers
    with pytest.raises(BatchError, match="sinks of layer 1: other than at the start"):
        backend.forward(query, key, value, with_sinks, batch)
    with pytest.raises(BatchError, match=r"at the start \(accepted: None, for the model has none\)"):
        backend.forward(query, key, value, without, batch, sinks=engine.holders[1].sinks)


@pytest.mark.parametrize("two_pools", [False, True])
@pytest.mark.parametrize("name", [triton])
def test_captured_decodes(name: str, two_pools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is run again with what it was captured with, as a graph is: the addresses bring the new step."""
    from attn_select_sglang.kernels import backend as module

    monkeypatch.setattr(module, "captures", lambda runner: True)
    engine = Engine(16, 7, two_pools)
    backend = made(engine, name, monkeypatch)
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    everyone = list(range(REQUESTS))
    batch, rows = engine.step(everyone, [5, 17, 1, 33, 8, 2])
    backend.init_forward_metadata(batch)
    engine.check(backend, batch, rows, everyone, batch.extend_seq_lens_cpu)
    for size in (2, 4):
        batch, _ = engine.step(everyone[:size], None)
        batch.out_cache_loc = torch.zeros_like(batch.out_cache_loc)  # SGLang captures with requests that do not exist
        for request in everyone[:size]:
            engine.lens[request] -= 1
            for seen in engine.seen:
                seen[request] = seen[request][:-1]
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    for chosen in ([0, 3], [5, 1, 4, 2], [3, 0], [2, 5, 0, 1], [4, 1, 3]):
        batch, rows = engine.step(chosen, None)
        fill = len(chosen) % 2
        fill_up(batch, fill)
        backend.init_forward_metadata_out_graph(batch)
        engine.check(backend, batch, rows, chosen, None, fill)


@pytest.mark.parametrize("two_pools", [False, True])
def test_a_replay_is_described_where_its_graph_reads_it(two_pools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor on the device is made and then copied there, and it says what the step does eagerly."""
    from attn_select_sglang.kernels.batch import common_of

    engine = Engine(16, 2, two_pools)
    backend = made(engine, "TORCH_SDPA", monkeypatch)
    engine.step([0, 1, 2], [40, 3, 17])
    batch, _ = engine.step([2, 0], None)
    for (_, in_window_pool), group in backend._groups.items():
        static = StaticBatch(group, 1)
        translate = engine.pool.translate_loc_from_full_to_swa if in_window_pool else None
        given = batch, 2, engine.requests.req_to_token, 16, translate
        eager, replayed = common_of(*given), common_of(*given, static)
        for field in dataclasses.fields(eager):
            wanted, found = (getattr(common, field.name) for common in (eager, replayed))
            assert torch.equal(found, wanted) if isinstance(wanted, Tensor) else found == wanted, field.name
        for name in ("query_start_loc", "seq_lens"):
            assert getattr(replayed, name).data_ptr() == getattr(static, name).data_ptr()
        assert replayed.block_table_tensor is not None
        assert replayed.block_table_tensor.data_ptr() == static.block_table.data_ptr()


def fill_up(batch: Any, requests: int) -> None:
    """Add requests to a decode that only fill a captured size: as SGLang does, with a row and a length, and no slot."""
    batch.batch_size += requests
    batch.req_pool_indices = pad(batch.req_pool_indices, (0, requests))
    batch.seq_lens = batch.seq_lens_cpu = pad(batch.seq_lens, (0, requests), value=1)


@pytest.mark.parametrize("kind", ["one_pool", "two_pools", "drafts"])
def test_steps_on_a_gpu_launch_what_is_compiled_at_the_start(kind: str) -> None:
    """On a GPU that is not here: the path of CUDA is gone through, and nothing runs."""
    command = [sys.executable, str(Path(__file__).with_name("steps_on_gpu.py")), kind]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled, launched, lacked = json.loads(done.stdout.splitlines()[-1])
    assert not lacked
    assert compiled >= launched >= 5


def test_steps_that_were_not_captured_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(16, 1)
    backend = made(engine, "TORCH_SDPA", monkeypatch)
    batch, _ = engine.step([0, 1], [3, 4])
    with pytest.raises(BatchError, match=r"EXTEND: captured steps are decodes \(accepted: DECODE\)"):
        backend.init_forward_metadata_out_graph(batch)
    batch, _ = engine.step([0, 1], None)
    with pytest.raises(BatchError, match=r"batch_size = 2: no decode of this size was captured \(captured: none\)"):
        backend.init_forward_metadata_out_graph(batch)


def test_what_the_adapter_does_not_serve_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(16, 1)
    engine.runner.spec_algorithm = SimpleNamespace(is_none=lambda: False, is_ngram=lambda: False)
    engine.runner.server_args.dcp_size, engine.runner.server_args.enable_two_batch_overlap = 2, True
    engine.layers[1].is_cross_attention = True
    engine.layers[0].use_irope = True
    engine.layers[0].xai_temperature_len = 100
    engine.layers[0].logit_cap, engine.layers[0].logit_capping_method = 30.0, "rational"
    engine.pool.kv_cache_layout = "hnd"
    engine.pool.__class__ = type("UnifiedPool", (type(engine.pool),), {})
    engine.runner.model_config.hf_config["model_type"] = "gpt_oss"
    with pytest.raises(ConfigError) as caught:
        made(engine, "TORCH_SDPA", monkeypatch)
    assert caught.value.message == (
        "attn-select's TORCH_SDPA does not run this model in SGLang: the adapter serves drafts by NGRAM alone; the "
        "adapter serves no drafts with MLA or windows; the adapter serves no context parallelism; the adapter serves "
        "no overlap of two batches; the adapter serves decoder layers alone; the adapter finds no sinks in the model; "
        "the adapter passes no chunks of attention; the adapter passes no temperature by length; the adapter caps by "
        "tanh alone; the adapter reads pools of layout nhd alone; the adapter reads no UnifiedPool"
    )


def test_arguments_that_are_not_passed_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(16, 1)
    backend = made(engine, "TORCH_SDPA", monkeypatch)
    batch, rows = engine.step([0], [3])
    backend.init_forward_metadata(batch)
    key, value = rows[0].split(KV_HEADS, dim=1)
    with pytest.raises(BatchError, match="cos_sin_cache given: attn-select's kernels in SGLang take none"):
        backend.forward(
            torch.zeros(3, HEADS * SIZE), key, value, engine.layers[0], batch, cos_sin_cache=torch.zeros(HEADS)
        )
    extend, batch.forward_mode = batch.forward_mode, type(batch.forward_mode).DLLM_EXTEND
    with pytest.raises(BatchError, match="forward_mode = DLLM_EXTEND: accepted are DECODE, EXTEND, MIXED, SPLIT_"):
        backend.init_forward_metadata(batch)
    batch.forward_mode = extend
    batch.seq_lens_cpu = None
    with pytest.raises(BatchError, match="seq_lens_cpu is None"):
        backend.init_forward_metadata(batch)


def test_keys_and_values_that_lie_apart_are_refused() -> None:
    from attn_select_sglang.kernels.cache_views import own_view

    key, value = torch.zeros(32, KV_HEADS, SIZE), torch.zeros(32, KV_HEADS, SIZE)
    with pytest.raises(ConfigError, match=r"keys \(32, 2, 32\) and values \(32, 2, 32\) apart"):
        own_view(key, value, 16)


def test_names_are_known_to_sglang() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from attn_select_sglang.names import OWN_KERNELS
    from attn_select_sglang.registration import register_kernels

    for _ in range(2):
        register_kernels()
        assert all(ATTENTION_BACKEND_CHOICES.count(name) == 1 and name in ATTENTION_BACKENDS for name in OWN_KERNELS)


def test_the_interface_is_sglangs() -> None:
    """Every method that the adapter defines is one of SGLang's base class, with its parameters first."""
    import inspect

    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs

    from attn_select_sglang.kernels.backend import OwnAttnBackend
    from attn_select_sglang.kernels.mha import OwnMHABackend
    from attn_select_sglang.kernels.mla import OwnMLABackend

    classes = (OwnAttnBackend, OwnMHABackend, OwnMLABackend)
    ours = [(name, value) for each in classes for name, value in vars(each).items() if inspect.isfunction(value)]
    for name, method in ours:
        if name.startswith("_"):
            continue
        installed = list(inspect.signature(getattr(AttentionBackend, name)).parameters)
        mine = list(inspect.signature(method).parameters)
        assert mine[: len(installed) - installed.count("kwargs")] == [each for each in installed if each != "kwargs"]
    used = {"forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"}
    used |= {
        "spec_info",
        "extend_seq_lens_cpu",
        "prefix_chunk_idx",
        "prefix_chunk_cu_seq_lens",
        "prefix_chunk_seq_lens_cpu",
    }
    used |= {"prefix_chunk_starts_cpu", "attn_attend_prefix_cache", "mha_return_lse"}
    assert used <= {name for each in ForwardBatch.__mro__ for name in vars(each).get("__annotations__", ())}
    assert set(vars(server_args())) <= set(ServerArgs.__annotations__)
    observed = {"forward_mode", "extend_lens", "prefix_lens", "spec_algorithm", "reqs"}
    assert observed <= {field.name for field in dataclasses.fields(ScheduleBatch)}
