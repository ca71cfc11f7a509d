"""Continuous batching runs on our kernels, on the engine's own pages, and gives the engine's tokens."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import triton_interpreter  # noqa: F401

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import models_for_tests as models  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.continuous_batching import cache as engine_cache  # noqa: E402
from transformers.generation.continuous_batching import continuous_api, model_runner  # noqa: E402

from attn_select import AttentionConfig, Selection, select  # noqa: E402
from attn_select.testing.toolkit import EmulatedSelection  # noqa: E402
from attn_select_transformers import captured, continuous, explain_model, kinds, paged  # noqa: E402

REQUESTS = 32
NEW = 16
KNOWN: dict[tuple[str | int, ...], list[int]] = {}
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases find no memory on a CPU."""
    monkeypatch.setattr(engine_cache.PagedAttentionMemoryHandler, "get_available_memory", lambda *_: 1 << 30)


def requests() -> list[list[int]]:
    torch.manual_seed(7)
    return [torch.randint(1, 96, (1 + 5 * i % 43,)).tolist() for i in range(REQUESTS)]


def batching(**options: Any) -> Any:
    """Small pages, and steps of so few tokens that prompts are cut and mixed with decodes."""
    known = ContinuousBatchingConfig.__dataclass_fields__
    page = "page_size" if "page_size" in known else "block_size"
    sizes = {page: 16, "num_blocks": 128, "max_batch_tokens": 64, "use_async_batching": False}
    return ContinuousBatchingConfig(**{name: value for name, value in (sizes | options).items() if name in known})


def tokens(model: Any, implementation: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    model.set_attn_implementation(implementation)
    found = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=batching(**options),
        progress_bar=False,
    )
    assert len(found) == len(prompts)
    order = sorted(found, key=lambda name: int(name.rpartition("_")[2]))
    return [list(found[name].generated_tokens) for name in order]


def alone(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What eager attention gives to each request by itself, worked out once per kind of model and request."""
    model.set_attn_implementation("eager")
    found = []
    for prompt in prompts:
        key = (type(model).__name__, model.config.hidden_size, *prompt)
        if key in KNOWN:
            found.append(KNOWN[key])
            continue
        ids = torch.tensor([prompt], device=model.device)
        with torch.no_grad():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
            )
        found.append(KNOWN.setdefault(key, whole[0, len(prompt) :].tolist()))
    return found


@pytest.mark.parametrize("make", [models.llama, models.qwen3, models.gemma2, models.gemma3, models.gpt_oss])
def test_requests_of_uneven_length_get_the_tokens_that_each_gets_alone(make: Any, calls: Counter[str]) -> None:
    model, prompts = models.built(make), requests()
    if make in (models.gemma2, models.gpt_oss):
        prompts = prompts[:8]
    expected = alone(model, prompts)
    calls.clear()
    found = tokens(model, "attn_select", prompts)
    assert found == expected
    assert calls["paged"] == calls["kernel"] > 0
    assert not calls["dense"]
    assert not calls["torch"]
    assert model.config._attn_implementation == "attn_select", "the name that the user gave comes back"
    assert sum(layer.count for layer in explain_model(model).layers) == model.config.num_hidden_layers


@pytest.mark.parametrize("blocks", [0, 8])
def test_full_layers_read_the_engines_pages_in_place(
    blocks: int, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By slots, and by block tables where every request decodes; the cache is gathered in neither."""
    seen: Counter[str] = Counter()
    original = paged.common_of

    def spy(*arguments: Any) -> Any:
        seen["table" if arguments[-1].get("block_table") is not None else "slots"] += 1
        return original(*arguments)

    monkeypatch.setattr(paged, "common_of", spy)
    monkeypatch.setattr(paged, "attend_runs", lambda *_: pytest.fail("keys were gathered"))
    model, prompts = models.built(models.llama), requests()
    expected = alone(model, prompts)
    calls.clear()
    assert tokens(model, "attn_select", prompts, max_blocks_per_request=blocks) == expected
    assert calls["paged"] == calls["kernel"]
    assert seen["slots"]
    assert bool(seen["table"]) == bool(blocks)


def test_decodes_come_first_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of one token counts as one. Kernels that launch decodes apart refuse it behind a longer one."""
    steps: list[list[int]] = []
    original = continuous.note_lens

    def noted(cache: Any, queries: list[int], past: list[int]) -> None:
        steps.append(queries)
        original(cache, queries, past)

    monkeypatch.setattr(continuous, "note_lens", noted)
    model = models.built(models.llama)
    prompts = [*requests()[1:4], requests()[0]]
    assert tokens(model, "attn_select", prompts) == alone(model, prompts)
    mixed = [queries for queries in steps if 1 in queries and max(queries) > 1]
    assert mixed
    assert all(queries[: queries.count(1)] == [1] * queries.count(1) for queries in mixed)


@pytest.mark.parametrize("page", [8, 24])
def test_pages_that_no_block_fills_are_read_by_slots(page: int, calls: Counter[str]) -> None:
    model, prompts = models.built(models.llama), requests()[:6]
    expected = alone(model, prompts)
    calls.clear()
    known = ContinuousBatchingConfig.__dataclass_fields__
    size = {"page_size" if "page_size" in known else "block_size": page}
    assert tokens(model, "attn_select", prompts, **size, num_blocks=256, max_blocks_per_request=8) == expected
    assert calls["paged"]


def test_shared_prefixes(calls: Counter[str]) -> None:
    """Requests with the same beginning share pages of the engine."""
    model = models.built(models.llama)
    common = requests()[8] * 3
    prompts = [common + prompt for prompt in requests()[:6]]
    expected = alone(model, prompts)
    calls.clear()
    assert tokens(model, "attn_select", prompts) == expected
    assert calls["paged"]


def test_flash_attention_that_is_installed_does_not_take_over(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would switch to it with a warning, whatever the model was loaded with."""
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)

    def fake(*_: Any, **__: Any) -> Any:
        raise AssertionError("flash attention was called")

    for name in ("flash_attention_2", "flash_attention_3", "paged|flash_attention_2", "paged|flash_attention_3"):
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, fake)
    model, prompts = models.built(models.llama), requests()[:4]
    expected = alone(model, prompts)
    calls.clear()
    assert tokens(model, "attn_select", prompts) == expected
    assert calls["paged"] == calls["kernel"] > 0


def test_other_attention_is_left_alone(calls: Counter[str]) -> None:
    model, prompts = models.built(models.llama), requests()[:4]
    expected = alone(model, prompts)
    assert tokens(model, "paged|eager", prompts, auto_switch_to_flash=False) == expected
    assert not calls


def test_a_manager_takes_requests_while_it_runs(calls: Counter[str]) -> None:
    """As ``transformers serve`` has it."""
    model, prompts = models.built(models.llama), requests()[:3]
    expected = alone(model, prompts)
    calls.clear()
    model.set_attn_implementation("attn_select")
    generation = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching())
    manager.start()
    found = []
    for prompt in prompts:
        name = manager.add_request(prompt, max_new_tokens=NEW)
        *_, result = manager.request_id_iter(name)
        assert result.is_finished()
        found.append(list(result.generated_tokens))
    manager.stop(block=True)
    assert found == expected
    assert calls["paged"] == calls["kernel"] > 0


def test_generate_after_continuous_batching(calls: Counter[str]) -> None:
    model, prompts = models.built(models.llama), requests()[:2]
    first = tokens(model, "attn_select", prompts)
    ids = torch.tensor(prompts[1:2])
    with torch.no_grad():
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, eos_token_id=None)
    assert whole[0, len(prompts[1]) :].tolist() == first[1]
    assert calls["dense"]
    assert calls["paged"]


def test_cuda_graphs_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = models.built(models.llama)
    tokens(model, "attn_select", requests()[:2], use_cuda_graph=True)
    assert "runs without CUDA graphs" in caplog.text


class Replayed:
    """Stands for a CUDA graph on a CPU: runs the function again, with the metadata of its capture.

    All that a step brings is thus read at the addresses that were captured, as a graph does.
    """

    replays = 0

    def __init__(self, function: Any, graphs: Any) -> None:
        self.function, self.graphs = function, graphs
        self.metadata = [fixed.metadata for fixed in graphs._fixed.values()]

    def replay(self) -> None:
        Replayed.replays += 1
        for fixed, metadata in zip(self.graphs._fixed.values(), self.metadata, strict=True):
            fixed.metadata = metadata  # every step's load puts its own here
        self.graphs.recording = True
        self.function()
        self.graphs.recording = False

    def reset(self) -> None:
        """The engine calls it in the end."""


def with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine capture decodes on a CPU."""
    made: list[Any] = []
    plain = model_runner.ModelRunner.__init__

    class Graphs(captured.Graphs):
        def __init__(self, most_requests: int) -> None:
            super().__init__(most_requests)
            made.append(self)

    def capturing(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        self.use_cuda_graph_decode = self.pad_inputs = True

    monkeypatch.setattr(Replayed, "replays", 0)
    monkeypatch.setattr(model_runner.ModelRunner, "__init__", capturing)
    monkeypatch.setattr(captured, "Graphs", Graphs)
    monkeypatch.setattr(
        captured, "recorded", lambda forward, arguments, *_: Replayed(lambda: forward(*arguments), made[-1])
    )


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
def test_captured_decodes_read_each_steps_batch(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On kernels that can be captured, as planned for a GPU that is not here."""
    with_graphs(monkeypatch)

    def for_gpu(config: AttentionConfig, *_: Any) -> Selection:
        return EmulatedSelection.of(select(config, "h200", backend="TRITON_ATTN"))

    monkeypatch.setattr(kinds, "select", for_gpu)
    kinds.forget()
    wide = {**models.GQA, "hidden_size": 128, "num_hidden_layers": 2}  # heads of 32, the least that the kernel takes
    model = models.built(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**wide)))
    prompts = requests()[1:4]
    expected = alone(model, prompts)
    calls.clear()
    assert tokens(model, "attn_select", prompts, max_blocks_per_request=8) == expected
    kinds.forget()
    assert Replayed.replays > 3
    assert calls["paged"] == calls["kernel"]


def test_kernels_that_cannot_be_captured_run_without_graphs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_graphs(monkeypatch)
    model, prompts = models.built(models.llama), requests()[:4]
    expected = alone(model, prompts)
    assert tokens(model, "attn_select", prompts, max_blocks_per_request=8) == expected
    assert not Replayed.replays
    assert caplog.text.count("runs without CUDA graphs: CUDA graphs of uniform batches") == 1
