"""Names, paths and broken files: one documented error each, naming the file, what was seen and what is accepted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attn_select.errors import ModelError, UnknownNameError
from attn_select.layer.models import layer_kinds, load

LLAMA = '{"model_type": "llama", "num_hidden_layers": 2}'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


@pytest.mark.parametrize(
    ("name", "near"), [("lama-3-8b", "llama-3-8b"), ("deepseek-v4", "deepseek-v3"), ("gemma3-27b", "gemma-3-27b")]
)
def test_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        load(name)
    assert caught.value.kind == "model"
    assert near in caught.value.nearest
    assert near in str(caught.value.hint)
    assert "config.json" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["meta-llama/Llama-3-8B", "./nowhere", "nowhere.json", "/no/where/config.json"])
def test_missing_path(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or folder") as caught:
        load(name)
    assert name in caught.value.message
    assert "nothing is downloaded" in str(caught.value.hint)
    if "Llama" in name:
        assert "llama-3-8b" in str(caught.value.hint)


def test_paths_and_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a config.json beats a preset of its name; a bare file or an empty folder does not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phi-2").mkdir()
    assert load("phi-2").raw["num_hidden_layers"] == 32
    (tmp_path / "phi-2" / "config.json").write_text(LLAMA)
    assert load("phi-2").source == os.path.join("phi-2", "config.json")
    (tmp_path / "phi-4").write_text(LLAMA)
    assert load("phi-4").model_type == "phi3"
    assert load("./phi-4").model_type == "llama"
    (tmp_path / "my.json").write_text(LLAMA)
    assert layer_kinds(load("my.json")).kinds[0].count == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"{", "not JSON"),
        (b"[1, 2]", "expected a JSON object, got [1, 2]"),
        (b"null", "expected a JSON object, got None"),
        (LLAMA.encode("utf-16"), "not UTF-8 (looks like UTF-16 or UTF-32)"),
        ('{"model_type": "café"}'.encode("latin-1"), "not UTF-8"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "key 'b' appears twice in one object"),
        (b'{"a": ' * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"model_type": 7}', "model_type = 7: expected a string"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_broken_files(file: Path, content: bytes, said: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load(str(file))
    assert str(file) in caught.value.message
    assert said in caught.value.message
    assert len(caught.value.message) < 600
    assert caught.value.__cause__ is None


def test_unreadable_things(file: Path) -> None:
    os.mkfifo(file)  # opening it would wait for a writer
    with pytest.raises(ModelError, match="not a regular file"):
        load(str(file))
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        load(str(file))
    with pytest.raises(ModelError, match="not a regular file"):
        load(str(file.parent))


def test_a_link_that_leads_nowhere(file: Path) -> None:
    file.symlink_to("nowhere")
    with pytest.raises(ModelError, match="no such file or folder"):
        load(str(file))
    file.unlink()
    file.symlink_to(file)
    with pytest.raises(ModelError, match="symbolic links"):
        load(str(file))
