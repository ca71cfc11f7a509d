"""Steps of SGLang's on a GPU that is not here: eager and captured ones, which launch what was compiled at the start.

``python steps_on_gpu.py [two_pools | drafts]`` prints a line of JSON: how many kernels of Triton were compiled ahead,
how many of them the steps launched, and what they lacked. Nothing is compiled or run.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
sys.path.append(str(Path(__file__).parents[3] / "plugins" / "triton" / "tests" / "aot"))

import test_sglang_drafts
import torch
from fake_gpu import OnGPU, kernels, noting, pretend
from test_sglang_kernels import HEADS, KV_HEADS, SIZE, Engine, emulated
from torch import Tensor

from attn_select.runtime import loaded_backend

DEVICE = torch.device("cuda", 0)


def on_gpu(tensor: Tensor) -> Tensor:
    """Return a tensor that says it is on the GPU."""
    return tensor.as_subclass(OnGPU)


def moved(engine: Engine) -> Engine:
    """Return an engine whose pools and tables are on the GPU, in bfloat16, and which captures decodes."""
    pool, runner = engine.pool, engine.runner
    pools = [pool] if engine.window_pages is None else [pool.full_kv_pool, pool.swa_kv_pool]
    for each in pools:
        halves = [torch.zeros(2, *keys.shape, dtype=torch.bfloat16) for keys in each.k_buffer]
        each.k_buffer, each.v_buffer = ([on_gpu(half[side]) for half in halves] for side in (0, 1))
    for each in (pool, *pools):
        each.dtype = torch.bfloat16
    # The engine itself goes on to read its table as the host's.
    table = on_gpu(engine.requests.req_to_token)
    runner.req_to_token_pool = SimpleNamespace(req_to_token=table, size=engine.requests.size)
    runner.device, runner.dtype, runner.server_args.disable_cuda_graph = "cuda", torch.bfloat16, False
    return engine


def run(engine: Engine, backend: Any, chosen: list[int], lens: list[int] | None, captured: bool | None = None) -> None:
    """Run a step: eager, as a graph is captured (True), or as one is replayed (False); decodes check drafts if any."""
    if lens is None and engine.runner.spec_algorithm.is_ngram():
        batch, rows, _ = test_sglang_drafts.step_of(engine, chosen)
        batch.spec_info.custom_mask = on_gpu(batch.spec_info.custom_mask)
    else:
        batch, rows = engine.step(chosen, lens)
    batch.seq_lens_cpu = batch.seq_lens
    for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
        setattr(batch, name, on_gpu(getattr(batch, name).clone()))
    if captured is None:
        backend.init_forward_metadata(batch)
    else:
        backend.init_forward_metadata_out_graph(batch, in_capture=captured)
    for layer, row in zip(engine.layers, rows, strict=True):
        query = torch.zeros(len(row), HEADS * SIZE, dtype=torch.bfloat16)
        key, value = row.bfloat16().split(KV_HEADS, dim=1)
        backend.forward(on_gpu(query), on_gpu(key.contiguous()), on_gpu(value.contiguous()), layer, batch)


def main(kind: str) -> None:
    """Start a backend and run steps of both kinds."""
    from attn_select_sglang.kernels import backend as adapter
    from attn_select_sglang.registration import made

    engine = test_sglang_drafts.engine_of(16, 3) if kind == "drafts" else Engine(16, 3, kind == "two_pools")
    moved(engine)
    pretend(90)
    loaded_backend.device_of = lambda selection, device: DEVICE  # type: ignore[assignment]
    adapter.select = functools.partial(emulated, gpu="h200")  # type: ignore[assignment]
    with noting() as ahead:
        backend = made("TRITON_ATTN", engine.runner)
    backend.init_cuda_graph_state(4, 4 * test_sglang_drafts.DRAFTS)
    with noting() as later:
        run(engine, backend, [0, 1, 2, 3], [5, 17, 1, 33])
        run(engine, backend, [0, 1], None)
        run(engine, backend, [2, 3, 0], [1, 7, 1])
        for chosen in ([0, 1], [0, 1, 2, 3]):
            run(engine, backend, chosen, None, captured=True)
            run(engine, backend, chosen[::-1], None, captured=False)
    compiled, launched = kernels(ahead), kernels(later)
    print(json.dumps([len(compiled), len(compiled & launched), sorted(launched - compiled)]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "one_pool")
