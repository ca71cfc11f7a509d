"""attn-select's MLA kernels behind SGLang's interface of backends, on its own pool, against float64 attention.

Runs where SGLang is installed (``make test-engines``). The batches are drawn, and so are the chunks in which SGLang
would bring a cached prefix. Latents stand for what a model would decompress: a head's key is its projection.
"""

from __future__ import annotations

import importlib.util
import os
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_on_cpu
import torch
from test_sglang_kernels import emulated, server_args
from torch import Tensor, nn

from attn_select import ConfigError, NoBackendError
from attn_select.runtime import BatchError
from attn_select.runtime.metadata import prefix_sums

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.filterwarnings("ignore::UserWarning:sglang.*", "ignore::DeprecationWarning"),
]
HEADS, RANK, ROPE, NOPE, VALUE = 4, 512, 64, 128, 128
LATENT, SCALE = RANK + ROPE, (NOPE + ROPE) ** -0.5
REQUESTS, CONTEXT, SLOTS, LAYERS, PAGE = 5, 96, 512, 2, 16
DTYPES = {"TORCH_MLA": torch.float32, "TRITON_MLA": torch.float16, "FLASHINFER_MLA": torch.float16}
GPUS = {"TRITON_MLA": "a100", "FLASHINFER_MLA": "h100"}
TOLERANCES = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.float16: {"rtol": 5e-3, "atol": 5e-3}}
DEEPSEEK = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 128,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "kv_lora_rank": RANK,
    "q_lora_rank": None,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
}
sglang_on_cpu.define_operations()
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
emulations = Path(__file__).parents[3] / "plugins" / "flashinfer" / "tests"


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of a request's last tokens, ``(T, H, D)`` on ``(S, H, D)`` and ``(S, H, V)``, in float64."""
    scores = torch.einsum("thd,shd->hts", query.double(), keys.double()) * SCALE
    hidden = torch.arange(len(keys)) > torch.arange(len(keys) - len(query), len(keys))[:, None]
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values.double())


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the emulated entries in the place of FlashInfer's, on a GPU of compute capability 9.0."""
    monkeypatch.syspath_prepend(emulations)
    import flashinfer_emulated

    from attn_select_flashinfer.runtime import library

    made = flashinfer_emulated.library()
    monkeypatch.setattr(library, "flashinfer", lambda: made)
    flashinfer_emulated.reset((9, 0))


class Engine:
    """An MLA model's layers, SGLang's pools, and requests that grow."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool

        self.dtype, self.random = dtype, random.Random(seed)
        torch.manual_seed(seed)
        self.pool = MLATokenToKVPool(SLOTS, PAGE, dtype, RANK, ROPE, LAYERS, "cpu", False)
        self.pool.write_loc_is_dcp_resolved = True  # asks for no ranks, of which there are none here
        for buffer in self.pool.kv_buffer:
            buffer.fill_(float("nan"))
        self.requests = ReqToTokenPool(REQUESTS, CONTEXT, "cpu", False)
        self.layers = []
        for index in range(LAYERS):
            layer = nn.Module()
            layer.attn_mqa = RadixAttention(HEADS, LATENT, SCALE, 1, index, v_head_dim=RANK)
            layer.attn_mha = RadixAttention(HEADS, NOPE + ROPE, SCALE, HEADS, index, v_head_dim=VALUE)
            self.layers.append(layer)
        self.projections = [torch.randn(RANK, HEADS, NOPE + VALUE) * RANK**-0.5 for _ in range(LAYERS)]
        self.pages, self.lens = list(range(1, SLOTS // PAGE)), [0] * REQUESTS
        self.random.shuffle(self.pages)
        self.seen = [[torch.empty(0, LATENT, dtype=dtype) for _ in range(REQUESTS)] for _ in range(LAYERS)]
        self.runner = SimpleNamespace(
            model=nn.ModuleList(self.layers),
            model_config=SimpleNamespace(hf_config=dict(DEEPSEEK), context_len=CONTEXT),
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.requests,
            page_size=PAGE,
            device="cpu",
            dtype=dtype,
            use_mla_backend=True,
            prefill_attention_backend_str="attn_select_torch_mla",
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            server_args=server_args(),
        )

    def made(self, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The backend on a CPU; Triton's as for a GPU, by its interpreter, FlashInfer's by emulated entries."""
        from attn_select_sglang.kernels import backend
        from attn_select_sglang.registration import made

        if name == "FLASHINFER_MLA":
            emulate(monkeypatch)
        if name in GPUS:
            monkeypatch.setattr(backend, "select", partial(emulated, gpu=GPUS[name]))
        return made(name, self.runner)

    def step(self, chosen: list[int], lens: list[int] | None) -> tuple[Any, list[Tensor]]:
        """Return the next step of these requests, decodes where no lengths are given, and its latents by layer."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        slots, new = [], lens or [1] * len(chosen)
        for request, length in zip(chosen, new, strict=True):
            row = self.requests.req_to_token[request + 1]
            for position in range(self.lens[request], self.lens[request] + length):
                first = position % PAGE == 0
                row[position] = self.pages.pop() * PAGE if first else row[position - 1] + 1
                slots.append(int(row[position]))
            self.lens[request] += length
        seq_lens = torch.tensor([self.lens[request] for request in chosen])
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE if lens is None else ForwardMode.EXTEND,
            batch_size=len(chosen),
            req_pool_indices=torch.tensor(chosen) + 1,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            extend_seq_lens_cpu=lens,
            out_cache_loc=torch.tensor(slots),
            out_cache_loc_is_physical=True,
            attn_attend_prefix_cache=False,
            mha_return_lse=False,
        )
        rows = [torch.randn(len(slots), LATENT).to(self.dtype) for _ in self.layers]
        for seen, row in zip(self.seen, rows, strict=True):
            for request, part in zip(chosen, row.split(new), strict=True):
                seen[request] = torch.cat([seen[request], part])
        return batch, rows

    def decompressed(self, index: int, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``(S, H, NOPE + ROPE)`` and values ``(S, H, VALUE)`` of latents, as the model makes them."""
        both = torch.einsum("sr,rhd->shd", latents[:, :RANK].float(), self.projections[index])
        rope = latents[:, None, RANK:].float().expand(-1, HEADS, -1)
        return torch.cat([both[..., :NOPE], rope], -1).to(self.dtype), both[..., NOPE:].to(self.dtype)

    def check_decodes(self, backend: Any, batch: Any, rows: list[Tensor], chosen: list[int]) -> None:
        for index, (layer, row) in enumerate(zip(self.layers, rows, strict=True)):
            query = torch.randn(len(row), HEADS, LATENT).to(self.dtype)
            key = row[:, None]
            output = backend.forward(query, key, key[..., :RANK], layer.attn_mqa, batch).view(-1, HEADS, RANK)
            for request, asked, given in zip(chosen, query, output, strict=True):
                keys = self.seen[index][request][:, None].expand(-1, HEADS, -1)
                wanted = attention(asked[None], keys, keys[..., :RANK])
                torch.testing.assert_close(given[None], wanted.to(self.dtype), **TOLERANCES[self.dtype])

    def check_prompts(self, backend: Any, batch: Any, rows: list[Tensor], chosen: list[int], chunk: int) -> None:
        """Attend to the new tokens, then to the cached ones in chunks of a length; merge, as SGLang does."""
        lens = batch.extend_seq_lens_cpu
        cached = [self.lens[request] - length for request, length in zip(chosen, lens, strict=True)]
        for index, (layer, row) in enumerate(zip(self.layers, rows, strict=True)):
            self.pool.kv_buffer[index][batch.out_cache_loc] = row[:, None]
            query = torch.randn(len(row), HEADS, NOPE + ROPE).to(self.dtype)
            batch.attn_attend_prefix_cache, batch.mha_return_lse = False, any(cached)
            found = backend.forward(query, *self.decompressed(index, row), layer.attn_mha, batch, save_kv_cache=False)
            parts = [found] if any(cached) else []
            for batch.prefix_chunk_idx in range(-(-max(cached) // chunk)):
                found = self._chunk(backend, batch, query, index, chosen, cached, chunk)
                parts.append(found)
            if parts:
                lses = torch.stack([lse for _, lse in parts])
                shares = lses.softmax(0)[..., None]
                found = (shares * torch.stack([output.float() for output, _ in parts])).sum(0)
            outputs = found.view(-1, HEADS, VALUE).to(self.dtype).split(lens)
            for request, asked, given in zip(chosen, query.split(lens), outputs, strict=True):
                wanted = attention(asked, *self.decompressed(index, self.seen[index][request]))
                torch.testing.assert_close(given, wanted.to(self.dtype), **TOLERANCES[self.dtype])

    def _chunk(
        self, backend: Any, batch: Any, query: Tensor, index: int, chosen: list[int], cached: list[int], size: int
    ) -> Any:
        first = batch.prefix_chunk_idx * size
        lens = torch.tensor([min(max(length - first, 0), size) for length in cached], dtype=torch.int32)
        batch.prefix_chunk_starts_cpu = {batch.prefix_chunk_idx: torch.full((len(cached),), first, dtype=torch.int32)}
        batch.prefix_chunk_seq_lens_cpu = {batch.prefix_chunk_idx: lens}
        batch.prefix_chunk_cu_seq_lens = {batch.prefix_chunk_idx: prefix_sums(lens)}
        batch.attn_attend_prefix_cache = True
        latents = [self.seen[index][who][first : first + int(n)] for who, n in zip(chosen, lens, strict=True)]
        keys = self.decompressed(index, torch.cat(latents))
        return backend.forward(query, *keys, self.layers[index].attn_mha, batch, save_kv_cache=False)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["TORCH_MLA", "FLASHINFER_MLA", pytest.param("TRITON_MLA", marks=interpreted)])
def test_drawn_steps(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, chunks with cached prefixes of some requests, single tokens among them, and decodes."""
    engine = Engine(DTYPES[name], seed)
    backend, draw, cached = engine.made(name, monkeypatch), engine.random, 0
    for _ in range(5 if name == "TRITON_MLA" else 12):
        chosen = draw.sample(range(REQUESTS), draw.randint(1, REQUESTS))
        chosen = [request for request in chosen if engine.lens[request] < CONTEXT - 24] or [0]
        if all(engine.lens[request] for request in chosen) and draw.random() < 0.4:
            batch, rows = engine.step(chosen, None)
            backend.init_forward_metadata(batch)
            engine.check_decodes(backend, batch, rows, chosen)
            continue
        cached += sum(engine.lens[request] for request in chosen)
        batch, rows = engine.step(chosen, [draw.choice([1, 3, 9, 22]) for _ in chosen])
        backend.init_forward_metadata(batch)
        engine.check_prompts(backend, batch, rows, chosen, draw.choice([7, 16, 64]))
    assert cached


@pytest.mark.parametrize("name", [pytest.param("TRITON_MLA", marks=interpreted)])
def test_captured_decodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured is run again with what it was captured with: the addresses bring the new step."""
    from attn_select_sglang.kernels import backend as module

    monkeypatch.setattr(module, "captures", lambda runner: True)
    engine = Engine(DTYPES[name], 7)
    backend = engine.made(name, monkeypatch)
    backend.init_cuda_graph_state(4, 4)
    everyone = list(range(REQUESTS))
    batch, rows = engine.step(everyone, [5, 17, 1, 33, 8])
    backend.init_forward_metadata(batch)
    engine.check_prompts(backend, batch, rows, everyone, 16)
    for size in (2, 4):
        batch.batch_size, batch.forward_mode = size, type(batch.forward_mode).DECODE
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    for chosen in ([0, 3], [4, 1, 0, 2], [3, 0]):
        batch, rows = engine.step(chosen, None)
        backend.init_forward_metadata_out_graph(batch)
        engine.check_decodes(backend, batch, rows, chosen)


def test_what_the_adapter_does_not_serve_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(torch.float32, 1)
    engine.pool.use_dsa, engine.pool.dtype = True, torch.float8_e4m3fn
    engine.runner.server_args.cuda_graph_config = SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))
    engine.layers[1].attn_mha = None
    with pytest.raises(ConfigError) as caught:
        engine.made("TORCH_MLA", monkeypatch)
    assert caught.value.message == (
        "attn-select's TORCH_MLA does not run this model in SGLang: the adapter serves MLA layers that have an "
        "attn_mqa and an attn_mha alone; the adapter serves no sparse MLA; the adapter reads latents in torch.float32 "
        "alone, the model's dtype; the adapter runs no MLA prompts in CUDA graphs (--cuda-graph-backend-prefill "
        "disabled turns them off)"
    )


def test_a_backend_of_other_layers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoBackendError, match="TORCH_SDPA"):
        Engine(torch.float32, 1).made("TORCH_SDPA", monkeypatch)


def test_prompts_on_latents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(torch.float32, 1)
    backend = engine.made("TORCH_MLA", monkeypatch)
    batch, rows = engine.step([0], [3])
    backend.init_forward_metadata(batch)
    key, layer = rows[0][:, None], engine.layers[0].attn_mqa
    with pytest.raises(BatchError, match="layer 0 is to write 512 values per token: accepted are prompts whose keys"):
        backend.forward(torch.zeros(3, HEADS, LATENT), key, key[..., :RANK], layer, batch)
