"""Text that is not ours (a config, a workload, a survey, names of files) forges no line and hides nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EVIL = "Llama\x1b[2J\r\nFORGED line \x1b]8;;http://evil\x07link\x1b]8;;\x07 \x9b31m \u202e"
NAME = "m\x1b[31m\nFORGED"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
}
COMMANDS = {
    "explain": ("explain", "--gpu", "h200"),
    "vllm": ("flags", "--gpu", "h200", "--engine", "vllm"),
    "matrix": ("matrix", "--gpu", "h200"),
    "json": ("explain", "--gpu", "h200", "--json"),
}


def printed(run: Any, *arguments: str) -> str:
    """Run a command and return what it printed, which must be clean."""
    result = run(*arguments)
    assert result.code in (0, 1, 2), result.err
    text: str = result.out + result.err
    assert not [line for line in text.split("\n") if not line.isprintable()], arguments
    assert not [line for line in text.split("\n") if line.lstrip().startswith("FORGED")], arguments
    return text


def model_in(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return folder


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("field", ["architectures", "model_type", "torch_dtype", "layer_types", "quantization_config"])
def test_a_config(run: Any, tmp_path: Path, field: str, command: tuple[str, ...]) -> None:
    values = {"architectures": [EVIL], "layer_types": [EVIL] * 2, "quantization_config": {"quant_method": EVIL}}
    folder = model_in(tmp_path / "model", **{field: values.get(field, EVIL)})
    printed(run, *command, "--model", str(folder), "--assume-attention")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_the_name_of_a_models_folder(run: Any, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert "FORGED" in printed(run, *command, "--model", str(model_in(tmp_path / NAME)))


def test_the_name_of_a_workload(run: Any, tmp_path: Path) -> None:
    for path, name in (
        (tmp_path / "w.toml", EVIL),
        (tmp_path / f"{NAME}.toml", "plain"),
        (tmp_path / f"{NAME}2.toml", ""),
    ):
        path.write_text(f'name = {json.dumps(name)}\n[[shapes]]\nbatch = "64q1s4k"\nweight = 1\n')
        printed(run, "explain", "--model", "llama-3-8b", "--gpu", "h200", "--workload", str(path))


def strings_of(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in strings_of(inner, (*place, key))]
    if isinstance(value, list):
        return [each for index, inner in enumerate(value) for each in strings_of(inner, (*place, index))]
    return [place] if isinstance(value, str) else []


def test_a_golden_file(run: Any, tmp_path: Path) -> None:
    asked = ("--model", "llama-3-8b", "--gpu", "h200")
    golden = run("explain", *asked, "--json").json
    places = strings_of(golden)
    for place in places[:: max(1, len(places) // 25)]:
        copy = json.loads(json.dumps(golden))
        inner = copy
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] += EVIL
        (tmp_path / "golden.json").write_text(json.dumps(copy))
        printed(run, "diff", *asked, "--golden", "golden.json")
