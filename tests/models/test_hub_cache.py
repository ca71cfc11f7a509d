"""Repositories in the local Hugging Face cache, found by name and by folder, without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attn_select.errors import ModelError
from attn_select.layer.models import load

OLD, NEW = "0" * 40, "1" * 40


def cache(hub: Path, repository: str, layers: dict[str, int | None], main: str | None = None) -> Path:
    """Make a repository's folder as huggingface_hub does: commits with their number of layers (None: no config)."""
    folder = hub / f"models--{repository.replace('/', '--')}"
    folder.mkdir(parents=True)
    for commit, number in layers.items():
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        if number is not None:
            (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": number}))
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "hf"


def layers_of(model: str | Path) -> int:
    return int(load(model).raw["num_hidden_layers"])


def test_main_is_the_revision(home: Path) -> None:
    folder = cache(home / "hub", "org/some-model", {OLD: 1, NEW: 2}, main=OLD)
    found = load("org/some-model")
    assert (found.name, found.source) == ("org/some-model", str(folder / "snapshots" / OLD / "config.json"))
    assert layers_of("org/some-model") == layers_of(folder) == layers_of(f"{folder}/") == 1
    assert layers_of(folder / "snapshots" / NEW) == 2


def test_without_main_the_only_snapshot_counts(home: Path) -> None:
    cache(home / "hub", "org/pinned", {OLD: None, NEW: 4})
    assert layers_of("org/pinned") == 4
    cache(home / "hub", "org/moved", {OLD: None, NEW: 5}, main=OLD)  # main has the weights alone
    assert layers_of("org/moved") == 5


def test_which_of_several_revisions_is_not_guessed(home: Path) -> None:
    folder = cache(home / "hub", "org/several", {OLD: 1, NEW: 2})
    with pytest.raises(ModelError, match="several revisions are cached and none of them is main") as caught:
        load("org/several")
    assert str(folder / "snapshots" / NEW) in str(caught.value.hint)


@pytest.mark.parametrize("layers", [{}, {NEW: None}])
def test_a_cached_repository_without_a_config(home: Path, layers: dict[str, int | None]) -> None:
    folder = cache(home / "hub", "org/weights", layers, main=NEW)
    for name in ("org/weights", str(folder)):
        with pytest.raises(ModelError, match=r"this cached repository holds no config\.json") as caught:
            load(name)
        assert "hf download org/weights config.json" in str(caught.value.hint)


def test_a_folder_here_beats_the_cache(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache(home / "hub", "org/name", {NEW: 2}, main=NEW)
    monkeypatch.chdir(tmp_path)
    assert layers_of("org/name") == 2
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 7}')
    assert layers_of("org/name") == 7


@pytest.mark.parametrize(
    ("variables", "hub"),
    [
        ({"HF_HUB_CACHE": "a", "HUGGINGFACE_HUB_CACHE": "b", "HF_HOME": "c"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "b", "HF_HOME": "c"}, "b"),
        ({"HF_HOME": "c", "XDG_CACHE_HOME": "d"}, "c/hub"),
        ({"HF_HOME": "~/c"}, "home/c/hub"),
        ({"XDG_CACHE_HOME": "d"}, "d/huggingface/hub"),
        ({}, "home/.cache/huggingface/hub"),
    ],
)
def test_where_the_cache_is(
    variables: dict[str, str], hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub finds it."""
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value if value.startswith("~") else str(tmp_path / value))
    cache(tmp_path / hub, "org/name", {NEW: 6}, main=NEW)
    assert layers_of("org/name") == 6
