"""Drawn steps in vLLM's order of requests, without vLLM: every output is attention in float64.

Requests come and end, prompts are cut in chunks, drafts are accepted in part, and the host knows bounds of the lengths.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_kernels import (
    BLOCK,
    HEADS,
    KV_HEADS,
    PAIR,
    SIZE,
    attention,
    backend_of,
    cache_of,
    layer_of,
    needs_interpreter,
    use,
)
from vllm_emulated import LLAMA, CommonAttentionMetadata

torch = pytest.importorskip("torch")

SLOTS, WIDTH = 6, 8
"""Requests that run at a time, and blocks of each."""
BUDGET = 64
"""Tokens of a step."""
WINDOWS = (None, 7)
"""Of the two layers: layers of one group may differ in it."""
STEPS = 10


@dataclass
class Request:
    """A request.

    Attributes:
        row: of the block table.
        prompt: tokens of its prompt.
        images: first and last positions of images in the prompt.
        new: tokens after which it ends.
        rows: keys and values of each token in the cache.
        generated: tokens so far.
    """

    row: int
    prompt: int
    images: list[tuple[int, int]]
    new: int
    rows: list[Any] = field(default_factory=list)
    generated: int = 0

    @property
    def computed(self) -> int:
        return len(self.rows)


def by_region(request: Request, query: int, longest_decode: int) -> Any:
    """As ``reorder_batch_to_split_decodes_and_prefills`` (v1/attention/backends/utils.py of vLLM 0.32) orders requests.

    Decodes, short extends, long extends, prefills.
    """
    if not request.computed:
        return 3
    if query > longest_decode:
        return 2
    return 0 if request.computed >= request.prompt else 1


def by_drafts(request: Request, query: int, longest_decode: int) -> Any:
    """As ``sort_batch_req_ids`` (v1/worker/gpu/model_runner.py of vLLM 0.32), the model runner V2, orders requests."""
    has_drafts = request.computed >= request.prompt and query > 1
    return not has_drafts, query != longest_decode, query


def scheduled(running: list[Request], drafts: int, draw: random.Random) -> list[tuple[Request, int]]:
    """Tokens of each request in a step, as a scheduler with chunked prefill gives them."""
    budget, found = BUDGET, []
    for request in running:
        left = request.prompt - request.computed
        wanted = left if left > 0 else 1 + draw.randint(0, drafts)
        if given := min(wanted, budget, draw.choice((wanted, wanted, 16, 1 if left > 0 else wanted))):
            found.append((request, given))
            budget -= given
    return found


def step_of(batch: list[tuple[Request, int]], table: Any, slack: int) -> Any:
    """The step as vLLM describes it; decodes' lengths on the host are bounds above by up to ``slack``."""
    lens = [query for _, query in batch]
    bounds = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    seq_lens = torch.tensor([request.computed + query for request, query in batch], dtype=torch.int32)
    done = torch.tensor([request.computed >= request.prompt for request, _ in batch])
    rows = table[[request.row for request, _ in batch]]
    slots = [
        int(table[request.row, place // BLOCK]) * BLOCK + place % BLOCK
        for request, query in batch
        for place in range(request.computed, request.computed + query)
    ]
    return CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        seq_lens=seq_lens,
        num_reqs=len(batch),
        num_actual_tokens=len(slots),
        max_query_len=max(lens),
        max_seq_len=int(seq_lens.max()) + slack,
        block_table_tensor=rows,
        slot_mapping=torch.tensor(slots),
        seq_lens_cpu_upper_bound=torch.where(done, seq_lens + slack, seq_lens).int(),
        mm_req_doc_ranges={place: request.images for place, (request, _) in enumerate(batch)},
    )


def drawn_images(prompt: int, draw: random.Random) -> list[tuple[int, int]]:
    """Draw an image of a prompt, or none."""
    first, last = sorted(draw.sample(range(prompt), 2)) if prompt > 2 else (0, 0)
    return [(first, last)] if last and draw.random() < 0.7 else []


ORDERS = [(by_region, 0, False, "0.26"), (by_region, 3, True, "LBHNC"), (by_drafts, 3, False, "LBNHC")]


@pytest.mark.parametrize(
    ("name", "order", "drafts", "images", "protocol"),
    [
        *(pytest.param("TORCH_SDPA", *each) for each in ORDERS),
        *(pytest.param("TRITON_ATTN", *each, marks=needs_interpreter) for each in ORDERS),
        pytest.param(PAIR, by_drafts, 3, False, "BLHNC", marks=needs_interpreter),
    ],
)
def test_drawn_steps(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, name: str, order: Any, drafts: int, images: bool, protocol: str
) -> None:
    config = use(vllm, None if name == "TORCH_SDPA" else "a100", monkeypatch, LLAMA)
    config.model_config.is_mm_prefix_lm = images
    if drafts:
        config.speculative_config = SimpleNamespace(num_speculative_tokens=drafts, draft_model_config=None)
    backend = backend_of(name, monkeypatch)
    impls = [backend.get_impl_cls()(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, w, "auto") for w in WINDOWS]
    layers = {f"layers.{i}": layer_of(impl) for i, impl in enumerate(impls)}
    config.compilation_config.static_forward_context = layers
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=BLOCK), list(layers), config, torch.device("cpu"))
    longest_decode = builder.reorder_batch_threshold
    slack = drafts if name == "TRITON_ATTN" else 0  # the others plan from exact lengths
    draw = random.Random(0)
    torch.manual_seed(0)
    table = torch.randperm(SLOTS * WIDTH, dtype=torch.int32).view(SLOTS, WIDTH)
    caches = [cache_of(backend, protocol, SLOTS * WIDTH) for _ in impls]
    running: list[Request] = []
    for _ in range(STEPS):
        free = [row for row in range(SLOTS) if row not in {request.row for request in running}]
        for row in free[: draw.randint(0, len(free))] or free[: not running]:
            prompt = draw.choice((1, 2, 5, 17, 40, 90))
            running.append(Request(row, prompt, drawn_images(prompt, draw) if images else [], draw.randint(1, 12)))
        batch = scheduled(running, drafts, draw)
        if longest_decode is not None:
            batch.sort(key=lambda each: order(*each, longest_decode))
        step = step_of(batch, table, slack)
        metadata = builder.build(0, step)
        tokens = step.num_actual_tokens
        query, key_value = torch.randn(tokens + 3, HEADS, SIZE), torch.randn(tokens + 3, 2 * KV_HEADS, SIZE)
        lens = [given for _, given in batch]
        for (request, _), part in zip(batch, key_value[:tokens].split(lens), strict=True):
            request.rows += list(part)
        key, value = key_value.split(KV_HEADS, dim=1)
        for layer, cache, window in zip(layers.values(), caches, WINDOWS, strict=True):
            output = torch.full((tokens + 3, HEADS, SIZE), torch.nan)
            layer.impl.do_kv_cache_update(layer, key, value, cache, step.slot_mapping)
            layer.impl.forward(layer, query, key, value, cache, metadata, output)
            assert output[tokens:].isnan().all(), "rows of padding"
            parts = (each[:tokens].split(lens) for each in (query, output))
            for (request, _), asked, given in zip(batch, *parts, strict=True):
                keys, values = torch.stack(request.rows).split(KV_HEADS, dim=1)
                wanted = attention(asked, keys, values, window, SIZE**-0.5, request.images).float()
                torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
        for request, given in batch:
            if request.computed > request.prompt:  # of a decode's tokens the first is real, and drafts are accepted
                accepted = draw.randint(1, given)
                del request.rows[request.computed - given + accepted :]
                request.generated += accepted
        running = [request for request in running if request.generated < request.new]
