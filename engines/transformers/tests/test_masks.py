"""Drawn masks, as models and users make them: the adapter's attention is torch's with the same mask."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import models_for_tests as models  # noqa: E402

from attn_select_transformers import dense  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
KINDS = ("causal", "window", "full", "both sides", "chunks", "packed", "prefix")
MASKS, SEEDS = 100, 8


class Module(torch.nn.Module):
    """What an attention function reads of a module."""

    num_key_value_groups = 2

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def drawn(kind: str, rows: int, keys: int, generator: Any) -> Any:
    """Return a mask ``(rows, keys)`` of a kind, true where a query sees a key; half of them with padding."""

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    row, key = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None]
    width = (1, 2, 3, 5, 8)[draw(5)]
    seen = key <= row
    if kind == "full":
        seen = torch.ones(rows, keys, dtype=torch.bool)
    elif kind == "window":
        seen = seen & (key > row - width)
    elif kind == "both sides":
        seen = (key - row).abs() < width
    elif kind == "chunks":
        seen = seen & (key // width == row // width)
    elif kind == "packed":
        begins = torch.tensor(sorted({0, draw(keys), draw(keys)}))
        part = torch.bucketize(torch.arange(keys), begins, right=True)
        seen = seen & (part[row.clamp(max=keys - 1)] == part[key])
    elif kind == "prefix":
        seen = seen | (key < width)
    if draw(2):
        edge = draw(keys)
        seen = seen & (key >= edge if draw(2) else key < max(1, edge))
    if not draw(10):
        seen = seen.clone()
        seen[draw(rows), draw(keys)] ^= True
    return seen


@pytest.mark.parametrize("on_pages", [False, True], ids=["dense", "pages"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_drawn_masks(seed: int, on_pages: bool, request: pytest.FixtureRequest) -> None:
    """Of ``MASKS`` masks a seed none is computed otherwise than torch does; rows without keys do not count."""
    if on_pages:
        request.getfixturevalue("pages")
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    for number in range(MASKS):
        batch, keys = (1, 1, 2, 3)[draw(4)], (1, 2, 3, 7, 13, 20)[draw(6)]
        rows = (1, keys, keys, 1 + draw(keys))[draw(4)]
        first = KINDS[draw(len(KINDS))]
        kinds = [first if draw(5) < 3 else KINDS[draw(len(KINDS))] for _ in range(batch)]
        seen = torch.stack([drawn(kind, rows, keys, generator) for kind in kinds])[:, None]
        if batch > 1 and not draw(4):
            seen[draw(batch)] = False  # a sequence that is all padding
        query = torch.randn(batch, 4, rows, 16, generator=generator)
        key, value = (torch.randn(batch, 2, keys, 16, generator=generator) for _ in range(2))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min) if draw(5) < 2 else seen
        options = {"sliding_window": (1, 2, 3, 5, 8)[draw(5)]} if not draw(3) else {}
        mode = torch.inference_mode if draw(2) else torch.no_grad
        with mode():
            found, _ = dense.attend(Module(bool(draw(3))), query, key, value, mask, scaling=0.25, **options)
        whole = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(query, *whole, attn_mask=seen, scale=0.25)
        counted = seen[:, 0].any(-1)
        apart = (found - expected.transpose(1, 2))[counted].abs()
        assert not apart.numel() or apart.max() < 1e-4, (number, kinds, seen.shape, options)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_an_encoders_row_that_is_all_padding(name: str, position: int, calls: Counter[str]) -> None:
    """The other rows see their own keys, wherever the empty row stands."""
    model = models.built(getattr(models, name))
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[position] = 0
    ids = torch.arange(1, 22).view(3, 7)
    wanted, found = models.both(model, lambda: model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert calls["dense"]


@pytest.mark.parametrize("name", models.DECODERS)
def test_inference_mode(name: str, calls: Counter[str]) -> None:
    """Padding and windows, where tensors count no changes."""
    model = models.built(models.DECODERS[name])
    ids = torch.arange(1, 39).view(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    found = []
    for implementation in ("eager", "attn_select"):
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            found.append(model(input_ids=ids, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
    assert calls["kernel"] == model.config.num_hidden_layers


def test_a_mask_that_changes_between_passes_of_inference_mode(pages: None) -> None:
    query, key, value = (torch.randn(1, 2, 5, 16) for _ in range(3))
    layers = [Module(True), Module(True)]
    with torch.inference_mode():
        mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
        for keep in (5, 3):
            mask[..., keep:] = False
            expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            for layer in layers:
                found, _ = dense.attend(layer, query, key, value, mask)
                torch.testing.assert_close(found, expected.transpose(1, 2))


def test_pages_that_inference_mode_made_serve_later_passes(pages: None) -> None:
    """The pages outlive the pass, and torch lets nobody write outside of inference mode what was made inside."""
    layer = Module(True)  # which holds its kind's kernels
    query = torch.randn(1, 2, 2, 24)  # no other test has heads of this size
    key, value = (torch.randn(1, 2, 5, 24) for _ in range(2))
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()[:, :, 3:]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            found, _ = dense.attend(layer, query, key, value, mask.clone())
            torch.testing.assert_close(found, expected.transpose(1, 2))


def test_whole_graphs_are_refused_in_words() -> None:
    model = models.built(models.llama)
    model.set_attn_implementation("attn_select")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with (
        torch.no_grad(),
        pytest.raises(Exception, match="fullgraph=False, or load the model with attn_implementation='sdpa'"),
    ):
        compiled(torch.arange(1, 9)[None], use_cache=False)


def test_weights_that_no_kernel_returns_are_said(caplog: pytest.LogCaptureFixture) -> None:
    query = torch.randn(1, 2, 5, 16)
    with torch.no_grad():
        for _ in range(2):
            dense.attend(Module(True), query, query, query, None, output_attentions=True)
    assert sum("output_attentions=True" in record.message for record in caplog.records) == 1
