"""``attn_implementation="attn_select"`` gives what transformers' own eager attention gives, token for token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import models_for_tests as models  # noqa: E402

from attn_select.errors import AttnSelectError  # noqa: E402
from attn_select_transformers import MaskError, explain_model  # noqa: E402

NEW = 24
PROMPT = 19
PADS = (0, 5, 11)
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]


def prompts(side: str = "left") -> dict[str, Any]:
    torch.manual_seed(3)
    ids = torch.randint(1, 96, (len(PADS), PROMPT))
    mask = torch.ones_like(ids)
    for row, pads in enumerate(PADS):
        mask[row, slice(0, pads) if side == "left" else slice(PROMPT - pads, PROMPT)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def tokens(model: Any, implementation: str, inputs: dict[str, Any], **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)


def check(model: Any, inputs: dict[str, Any], **options: Any) -> None:
    expected = tokens(model, "eager", inputs, **options)
    assert len(set(expected[0].tolist())) > 4, "the model repeats itself, and proves nothing"
    assert torch.equal(tokens(model, "attn_select", inputs, **options), expected)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", models.DECODERS)
def test_greedy_tokens_are_eagers(name: str, cache: str | None, calls: Counter[str]) -> None:
    """Prompts padded on the left; every layer of every step runs on a kernel."""
    model = models.built(models.DECODERS[name])
    check(model, prompts(), cache_implementation=cache)
    assert calls["dense"] == calls["kernel"] == NEW * model.config.num_hidden_layers
    assert not calls["torch"]


def test_beams_reorder_the_cache(calls: Counter[str]) -> None:
    check(models.built(models.llama), prompts(), num_beams=3)
    assert calls["kernel"]
    assert not calls["torch"]


def test_a_prompt_in_chunks(calls: Counter[str]) -> None:
    """Queries in the middle of a sequence, keys before them in the cache."""
    model = models.built(models.gemma3)
    ids = prompts()["input_ids"][:1]
    logits = []
    for implementation in ("eager", "attn_select"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            first = model(ids[:, :8], use_cache=True)
            logits.append(model(ids[:, 8:], past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert calls["kernel"] == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize("make", [models.bart, models.t5], ids=["bart", "t5"])
def test_encoder_decoder(make: Callable[[], Any], calls: Counter[str]) -> None:
    """Loaded with the name: in releases before 5.23 ``set_attn_implementation`` does not reach T5's two stacks."""
    model = models.built(make)
    found = []
    for implementation in ("eager", "attn_select"):
        loaded = type(model)._from_config(deepcopy(model.config), attn_implementation=implementation).eval()
        loaded.load_state_dict(model.state_dict())
        with torch.no_grad():
            options = {"max_new_tokens": NEW, "do_sample": False, "no_repeat_ngram_size": 1}
            found.append(loaded.generate(**prompts("right"), **options))
    assert torch.equal(*found)
    model = loaded
    assert calls["dense"]
    if make is models.t5:
        assert calls["torch"], "a position bias is for torch"
        assert "a position bias" in str(explain_model(model))
    else:
        assert calls["dense"] == calls["kernel"]


def test_whisper(calls: Counter[str]) -> None:
    model = models.built(models.whisper)
    torch.manual_seed(5)
    inputs = {"input_features": torch.randn(2, 16, 40), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    check(model, inputs)
    assert calls["dense"] == calls["kernel"]


@pytest.mark.parametrize("make", [models.bert, models.modernbert], ids=["bert", "modernbert"])
def test_encoders(make: Callable[[], Any], calls: Counter[str]) -> None:
    """Tokens that are no padding get what eager gives."""
    model, inputs = models.built(make), prompts("right")
    wanted, found = models.both(model, lambda: model(**inputs).last_hidden_state[inputs["attention_mask"].bool()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert calls["dense"] == model.config.num_hidden_layers
    if make is models.bert:
        assert calls["kernel"] == calls["dense"]


def test_vision_tower(calls: Counter[str]) -> None:
    model = models.built(models.siglip)
    torch.manual_seed(5)
    pixels = torch.randn(2, 3, 32, 32)
    wanted, found = models.both(model, lambda: model(pixel_values=pixels).last_hidden_state)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert calls["dense"] == calls["kernel"] >= 2
    (layer, *_) = explain_model(model).layers
    assert layer.selection.config.attn_type == "encoder_only"


def test_packed_sequences_are_kept_apart(calls: Counter[str]) -> None:
    """Several sequences in one row, told apart by their positions: one request each."""
    model = models.built(models.llama)
    ids = prompts()["input_ids"][:1]
    positions = torch.cat((torch.arange(7), torch.arange(PROMPT - 7)))[None]
    wanted, found = models.both(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert calls["kernel"] == calls["dense"]


def holes(dtype: Any) -> Any:
    """A mask that hides every third token but the last: no kernel counts that out."""
    seen = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
    seen[:, 1::3] = False
    seen |= torch.eye(PROMPT, dtype=torch.bool)
    seen = seen.expand(1, 1, PROMPT, PROMPT)
    return seen if dtype is torch.bool else torch.where(seen, 0.0, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_no_kernel_expresses_goes_to_torch_and_is_seen(
    dtype: Any, calls: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = models.built(models.llama)
    ids = prompts()["input_ids"][:1]
    logits = []
    for implementation in ("eager", "attn_select"):
        mask = holes(torch.float32 if implementation == "eager" else dtype)
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(model(ids, attention_mask=mask).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert calls["torch"] == calls["dense"] == model.config.num_hidden_layers
    (reason,) = explain_model(model).without_kernel
    assert "is not made of causal, windowed or whole runs" in reason


def test_a_float_mask_that_is_causal_runs_on_a_kernel(calls: Counter[str]) -> None:
    model = models.built(models.llama)
    ids = prompts()["input_ids"][:1]
    mask = torch.full((PROMPT, PROMPT), torch.finfo(torch.float32).min).triu(1)[None, None]
    wanted, found = models.both(model, lambda: model(ids, attention_mask=mask).logits)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert calls["kernel"] == calls["dense"]


@pytest.mark.parametrize(("make", "lacks"), [(models.gemma2, "no soft cap"), (models.gpt_oss, "sinks")])
def test_a_mask_that_torch_cannot_take_either_is_refused(make: Callable[[], Any], lacks: str) -> None:
    model = models.built(make)
    model.set_attn_implementation("attn_select")
    mask = {kind: holes(torch.bool) for kind in ("full_attention", "sliding_attention")}
    with torch.no_grad(), pytest.raises(MaskError, match=lacks) as caught:
        model(prompts()["input_ids"][:1], attention_mask=mask)
    assert "eager" in str(caught.value.hint)


def test_a_rule_may_refuse_such_masks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_select import clear_cache
    from attn_select_transformers.kinds import forget

    rules = tmp_path / "rules.toml"
    rules.write_text('version = 1\n[[rules]]\nname = "no torch"\ndeny = ["TORCH_SDPA"]\nbecause = "a test"\n')
    monkeypatch.setenv("ATTN_SELECT_RULES", str(rules))
    clear_cache()
    forget()
    try:
        model = models.built(models.llama)
        model.set_attn_implementation("attn_select")
        with torch.no_grad(), pytest.raises(AttnSelectError, match="TORCH_SDPA is not allowed") as caught:
            model(prompts()["input_ids"][:1], attention_mask=holes(torch.bool))
        assert isinstance(caught.value, MaskError)
    finally:
        monkeypatch.undo()
        clear_cache()
        forget()


def test_training_keeps_its_gradients(calls: Counter[str]) -> None:
    model = models.built(models.llama)
    model.set_attn_implementation("attn_select")
    inputs = prompts()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert calls["torch"] == model.config.num_hidden_layers
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    assert any("gradients" in reason for reason in explain_model(model).without_kernel)
