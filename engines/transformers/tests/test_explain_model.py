"""``explain_model``: per layer what was chosen and why, before and after a run."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import models_for_tests as models  # noqa: E402

from attn_select.errors import ConfigError  # noqa: E402
from attn_select_transformers import explain_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_before_a_run_the_config_speaks() -> None:
    found = explain_model(models.built(models.gemma3))
    assert not found.ran
    asked = [(layer.count, layer.selection.config.sliding_window) for layer in found.layers]
    assert asked == [(2, 12), (1, None)]
    assert all(layer.selection.config.dtype == "float32" for layer in found.layers)
    assert str(found).startswith("not run with attn_implementation='attn_select': this is what its config would get")


def test_after_a_run_each_module_is_named(calls: Counter[str]) -> None:
    model = models.built(models.gemma3)
    model.set_attn_implementation("attn_select")
    with torch.no_grad():
        model(torch.arange(1, 30)[None])
    found = explain_model(model)
    assert calls["kernel"] == 3
    assert found.ran
    assert [layer.modules for layer in found.layers] == [
        ["model.layers.0.self_attn", "model.layers.1.self_attn"],
        ["model.layers.2.self_attn"],
    ]
    assert [layer.selection.config.sliding_window for layer in found.layers] == [12, None]
    text = str(found)
    assert "2 layers: model.layers.0.self_attn, model.layers.1.self_attn" in text
    assert found.layers[0].selection.explain() in text
    assert found.without_kernel == {}


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameters"):
        explain_model(torch.nn.Module())
