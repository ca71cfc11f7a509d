"""Several threads at once, with one model and with models of one shape: each gets what it gets alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import models_for_tests as models  # noqa: E402

import attn_select_transformers  # noqa: E402, F401

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
THREADS, CALLS = 4, 6


def in_threads(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Run ``work(0)``, ``work(1)``, … side by side; raise what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # it is raised below
            errors.append(error)

    started = [threading.Thread(target=guarded, args=(index,)) for index in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def prompt(seed: int) -> dict[str, Any]:
    """Two prompts of an own length and padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (2, 9 + 3 * seed), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, : 1 + seed] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("on_pages", [False, True], ids=["dense", "pages"])
def test_one_model_in_four_threads(on_pages: bool, request: pytest.FixtureRequest) -> None:
    if on_pages:
        request.getfixturevalue("pages")
    model = models.built(models.llama)

    model.set_attn_implementation("eager")

    def tokens(index: int) -> Any:
        return model.generate(**prompt(index), max_new_tokens=8, do_sample=False)

    expected = [tokens(index) for index in range(THREADS)]
    model.set_attn_implementation("attn_select")
    wrong: Counter[int] = Counter()

    def work(index: int) -> None:
        for _ in range(CALLS):
            wrong[index] += not torch.equal(tokens(index), expected[index])

    in_threads(work)
    assert sum(wrong.values()) == 0


@pytest.mark.parametrize("make", [models.llama, models.gemma2], ids=["llama", "gemma2"])
def test_two_models_of_one_shape_a_thread_each(make: Callable[[], Any], pages: None) -> None:
    made = [models.built(make), models.built(make)]
    with torch.no_grad():
        for parameter in made[1].parameters():
            parameter.mul_(1.25)
    batches = [prompt(2), prompt(2)]
    for model in made:
        model.set_attn_implementation("eager")

    def logits(index: int) -> Any:
        with torch.no_grad():
            return made[index](**batches[index]).logits[batches[index]["attention_mask"].bool()]

    expected = [logits(index) for index in range(2)]
    for model in made:
        model.set_attn_implementation("attn_select")
    worst = [0.0, 0.0]

    def work(index: int) -> None:
        for _ in range(40):
            worst[index] = max(worst[index], (logits(index) - expected[index]).abs().max().item())

    in_threads(work, 2)
    assert max(worst) < 1e-3
    assert (expected[0] - expected[1]).abs().max() > 0.1, "the models are alike, and prove nothing"


def test_two_models_in_continuous_batching(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching import cache

    monkeypatch.setattr(cache.PagedAttentionMemoryHandler, "get_available_memory", lambda *_: 1 << 30)
    known = ContinuousBatchingConfig.__dataclass_fields__
    sizes = {"page_size": 16, "block_size": 16, "num_blocks": 32, "max_batch_tokens": 64, "use_async_batching": False}
    batching = ContinuousBatchingConfig(**{name: value for name, value in sizes.items() if name in known})
    generation = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    made = [models.built(models.llama), models.built(models.llama)]
    with torch.no_grad():
        for parameter in made[1].parameters():
            parameter.mul_(1.25)
    asked = [[[1, 2, 3], list(range(1, 30)), list(range(40, 60))], [list(range(5, 50)), [7, 8], [9] * 5]]

    def tokens(index: int) -> list[list[int]]:
        found = made[index].generate_batch(
            inputs=asked[index],
            generation_config=generation,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        return [list(found[name].generated_tokens) for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]

    expected = [tokens(index) for index in range(2)]
    for model in made:
        model.set_attn_implementation("attn_select")
    found: dict[int, list[list[int]]] = {}

    def work(index: int) -> None:
        found[index] = tokens(index)

    in_threads(work, 2)
    assert [found[0], found[1]] == expected
    assert calls["paged"]


def test_scratch_is_freed_with_the_last_model(pages: None) -> None:
    from attn_select_transformers.kinds import choices_of

    model = models.built(models.llama)
    model.set_attn_implementation("attn_select")
    with torch.no_grad():
        model(**prompt(1))
    attention = model.model.layers[0].self_attn
    kind = next(iter(choices_of(attention).kinds))
    pages_of_kind = weakref.ref(kind.kernels().state["cache"])
    assert pages_of_kind() is not None
    del model, attention, kind
    gc.collect()
    assert pages_of_kind() is None
