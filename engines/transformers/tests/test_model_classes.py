"""Every model class of the installed release gives what eager attention gives, or is refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import model_classes  # noqa: E402
import models_for_tests as models  # noqa: E402

from attn_select_transformers import RELEASES, MaskError, ModelNotServedError, explain_model  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
TOLERANCE = 1e-3
"""Of the largest output, in float32."""
QUICK = ("bloom", "falcon", "gpt2", "gptj", "llama", "opt", "pegasus_x", "roformer", "t5", "trocr", "umt5", "vilt")
"""Model types that `make test` runs: ones that were wrong, or that a KeyError ended, among ones that are served."""
REFUSED = (
    *("bloom", "codegen", "convbert", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "ibert", "layoutlmv3", "led"),
    *("luke", "megatron-bert", "mpnet", "mpt", "nllb-moe", "pegasus_x", "rembert", "roformer", "squeezebert", "trocr"),
    *("vilt", "xglm"),
)
"""Model types that must not run: they were wrong, or ended by a KeyError, before attn-select refused them."""


def cases() -> list[Any]:
    """Return all model types in the newest release, in which `make test-all` runs; in others the quick ones."""
    newest = transformers.__version__.startswith(RELEASES[-1])
    slow = pytest.mark.slow(guard="some model types of each kind")
    return [
        pytest.param(name, marks=[] if name in QUICK else [slow])
        for name in model_classes.model_types()
        if newest or name in QUICK
    ]


def like(model: Any, implementation: str) -> Any:
    """Return a model with the same weights, loaded with another attention."""
    made = type(model)._from_config(deepcopy(model.config), attn_implementation=implementation).eval()
    made.load_state_dict(model.state_dict())
    for ours, theirs in zip(made.buffers(), model.buffers(), strict=True):
        ours.data.copy_(theirs)
    return made


@pytest.mark.parametrize("model_type", cases())
def test_equal_or_refused(model_type: str) -> None:
    model_class = model_classes.model_class(model_type)
    made = None if model_class is None else model_classes.made(model_class)
    if made is None:
        pytest.skip("no small config and batch of ours fit it")
    eager, batch, expected = made
    try:
        found = model_classes.output(like(eager, "attn_select"), batch)
    except (ModelNotServedError, MaskError):
        return
    assert model_type not in REFUSED
    if expected.isnan().any() or not torch.equal(model_classes.output(eager, batch), expected):
        pytest.skip("eager attention gives no number, or another each time")
    bound = TOLERANCE * max(1.0, expected.abs().max().item())
    if bound < (found - expected).abs().max().item() < 10 * bound:  # roundings grow in some: by as much in sdpa's
        expected = model_classes.output(like(eager, "sdpa"), batch)
    assert (found - expected).abs().max().item() <= bound


@pytest.mark.parametrize("name", ["BloomConfig", "GPTJConfig"])
def test_models_with_attention_of_their_own_are_refused(name: str) -> None:
    """At load and by ``set_attn_implementation``, with what to use instead; the model stays as it was."""
    config = getattr(transformers, name)(vocab_size=96, n_layer=1, n_head=2, n_embd=32, hidden_size=32, rotary_dim=8)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with pytest.raises(ModelNotServedError, match='load it with attn_implementation="eager"'):
        model_class._from_config(deepcopy(config), attn_implementation="attn_select")
    model = model_class._from_config(deepcopy(config), attn_implementation="eager")
    with pytest.raises(ModelNotServedError, match=model_class.__name__):
        model.set_attn_implementation("attn_select")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ModelNotServedError):
        explain_model(model)


def test_explain_says_that_no_kernel_ran() -> None:
    """A model that runs on eager attention was not served by what its config would get."""
    model = models.built(models.llama)
    model.set_attn_implementation("eager")
    assert str(explain_model(model)).startswith("not run with attn_implementation='attn_select'")
