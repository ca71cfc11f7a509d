"""Whole models from transformers generate through our layers: token for token what their own eager attention gives.

Random weights, float32, greedy. The requests are packed into one sequence of tokens: prompts are prefilled in chunks
while earlier requests decode, on a paged cache that is poisoned where nobody wrote.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import models_for_tests as models  # noqa: E402
from paged_engine import IMAGE, NEW_TOKENS, PROMPTS, generated  # noqa: E402

LONGER = (
    *(models.mistral, models.gemma2, models.llama4, models.gemma4, models.deepseek_v3),
    *(models.deepseek_v32, models.glm_moe_dsa, models.gemma3_images),
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def image_types(prompt: list[int]) -> dict[str, torch.Tensor]:
    """Return the argument that says which tokens are an image's."""
    places = torch.arange(len(prompt))
    return {"token_type_ids": ((places >= IMAGE[0]) & (places <= IMAGE[1])).long()[None]}


@pytest.mark.parametrize(
    "make",
    [models.llama, *(pytest.param(make, marks=pytest.mark.slow(guard="llama")) for make in LONGER)],
)
def test_tokens_are_those_of_eager_attention(make: Any) -> None:
    model = models.built(make)
    config = model.config.get_text_config()
    prompts = [torch.randint(config.vocab_size, (length,)).tolist() for length in PROMPTS]
    has_image = hasattr(model.config, "vision_config")
    prompts = [[token % 90 for token in prompt] for prompt in prompts] if has_image else prompts  # no image is encoded
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        wanted = [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                **(image_types(prompt) if has_image else {}),
            )[0].tolist()
            for prompt in prompts
        ]
        got = generated(model, prompts)
    assert got == wanted
    assert all(len(set(text[-NEW_TOKENS:])) > 10 for text in got)
