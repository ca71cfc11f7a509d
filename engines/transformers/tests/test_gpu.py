"""On a GPU, in half precision, the adapter is as near to eager attention as transformers' own sdpa is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import models_for_tests as models  # noqa: E402
from test_continuous_batching import alone, requests, tokens  # noqa: E402
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs  # noqa: E402

from attn_select_transformers import captured, paged  # noqa: E402

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
WIDE = {**models.GQA, "hidden_size": 256, "head_dim": 64, "initializer_range": 0.05}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE))


def gemma3() -> Any:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**WIDE, sliding_window=12, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config)


def on_gpu(make: Any) -> Any:
    return models.built(make).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("make", [llama, gemma3])
def test_teacher_forced_logits(make: Any, calls: Counter[str]) -> None:
    """Within twice the error that sdpa has against eager."""
    model = on_gpu(make)
    ids = torch.randint(1, 96, (3, 200), device=DEVICE)
    mask = (torch.arange(200) >= torch.tensor([0, 17, 93])[:, None]).long().to(DEVICE)
    found = {}
    for implementation in ("eager", "sdpa", "attn_select"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = model(ids, attention_mask=mask).logits[mask.bool()].float()
    own = (found["sdpa"] - found["eager"]).abs().max()
    assert (found["attn_select"] - found["eager"]).abs().max() <= 2 * own
    assert calls["kernel"] == calls["dense"] == model.config.num_hidden_layers


@pytest.mark.parametrize("make", [llama, gemma3])
def test_layers_of_continuous_batching(make: Any, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's output, against float32 attention over the keys that it should see."""
    original = paged.attend
    past: dict[tuple[int, int], tuple[Any, Any]] = {}
    worst = [0.0]
    steps: list[list[str]] = []
    prepare = ContinuousBatchingIOs.prepare_batch_tensors

    def checked(layer: Any, cache: Any, module: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        output = original(layer, cache, module, query, key, value, *rest)
        lens, row = cache._attn_select_lens, 0
        for name, new, old in zip(steps[-1], lens.queries, lens.past, strict=True):
            rows = slice(row, row + new)
            keys, values = (tensor[0, :, rows].float() for tensor in (key, value))
            if old:
                before = past[module.layer_idx, name]
                keys = torch.cat((before[0][:, :old], keys), 1)
                values = torch.cat((before[1][:, :old], values), 1)
            past[module.layer_idx, name] = keys, values
            seen = torch.ones(new, old + new, dtype=torch.bool, device=keys.device).tril(old)
            if layer.window is not None:
                seen &= ~torch.ones_like(seen).tril(old - layer.window)
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[0, :, rows].float(), keys, values, attn_mask=seen, scale=rest[0], enable_gqa=True
            )
            worst[0] = max(worst[0], (output[0, rows].transpose(0, 1).float() - expected).abs().max().item())
            row += new
        return output

    def remember(io: Any, requests_in_batch: Any, *arguments: Any, **options: Any) -> None:
        prepare(io, requests_in_batch, *arguments, **options)
        steps.append([request.state.request_id for request in io.requests_in_batch])

    monkeypatch.setattr(paged, "attend", checked)
    monkeypatch.setattr(ContinuousBatchingIOs, "prepare_batch_tensors", remember)
    tokens(on_gpu(make), "attn_select", requests(), use_cuda_graph=False)
    assert calls["kernel"]
    assert 0 < worst[0] < 2e-2


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_decodes(dtype: Any, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's replay computes what the same step computes when its kernels are launched."""
    original, seen = captured.recorded, Counter[str]()

    class Checked:
        def __init__(self, forward: Any, arguments: Any, *rest: Any) -> None:
            self.graph = original(forward, arguments, *rest)
            self.forward, self.arguments = forward, arguments
            self.graphs = made[-1]

        def replay(self) -> None:
            self.graph.replay()
            rows = len(paged.lens_of(self.arguments[1]["cache"]).queries)
            output = self.arguments[-1][0, :rows]
            replayed = output.clone()
            self.graphs.recording = True
            self.forward(*self.arguments)
            self.graphs.recording = False
            seen["tokens"] += rows
            seen["equal"] += int((output == replayed).sum())

        def reset(self) -> None:
            self.graph.reset()

    class Graphs(captured.Graphs):
        def __init__(self, most_requests: int) -> None:
            super().__init__(most_requests)
            made.append(self)

    made: list[Any] = []
    monkeypatch.setattr(captured, "Graphs", Graphs)
    monkeypatch.setattr(captured, "recorded", Checked)
    model = models.built(llama).to(DEVICE, dtype)
    options = {"max_blocks_per_request": 8, "use_async_batching": asynchronous}
    found = tokens(model, "attn_select", requests(), **options)
    assert seen["tokens"] > 100
    assert seen["equal"] >= 0.98 * seen["tokens"], "near ties may go either way: bounds that change splits are captured"
    if dtype == torch.float32:
        assert seen["equal"] == seen["tokens"]
        assert found == alone(model, requests()), "prompts and decodes in one step, on kernels that want decodes first"
        assert found == tokens(model, "attn_select", requests(), **options, use_cuda_graph=False)
