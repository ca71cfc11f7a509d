"""The published configs, and a way to read a config that is no file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select.layer.models import LayerKinds, ModelSource, layer_kinds

CONFIGS = Path(__file__).parent / "data" / "configs"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``published`` once per published config."""
    if "published" in metafunc.fixturenames:
        folders = sorted(folder for folder in CONFIGS.iterdir() if folder.is_dir())
        metafunc.parametrize("published", folders, ids=[folder.name for folder in folders])


@pytest.fixture(autouse=True)
def _no_hub_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hugging Face cache of this machine is nobody's business here."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "no hub"))


@pytest.fixture(scope="session")
def origins() -> dict[str, dict[str, Any]]:
    """Where each published config was found."""
    table: dict[str, dict[str, Any]] = json.loads((CONFIGS / "ORIGINS.json").read_text())
    return table


@pytest.fixture(scope="session")
def configs() -> Path:
    """The folder of the published configs."""
    return CONFIGS


@pytest.fixture(scope="session")
def trial() -> Path:
    """The folder of configs that were read wrong once."""
    return CONFIGS.parent / "trial"


@pytest.fixture(scope="session")
def kinds() -> Callable[..., LayerKinds]:
    """Return a function that reads a config given as a dict, with ``layer_kinds``' arguments."""

    def read(config: dict[str, Any], **arguments: Any) -> LayerKinds:
        model_type = config.get("model_type", "")
        return layer_kinds(ModelSource("a config", "", model_type, config, "a test"), **arguments)

    return read
