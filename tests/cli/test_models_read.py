"""What ``explain`` and ``flags`` make of a model's own config: its cache, its layers, what no kernel computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TRIAL = Path(__file__).parents[1] / "models" / "data" / "trial"


def ask(run: Any, command: str, name: str, *options: str, gpu: str = "h100") -> Any:
    return run(*command.split(), "--model", str(TRIAL / f"{name}.json"), "--gpu", gpu, *options, "--json")


def argument(document: dict[str, Any], flag: str) -> str | None:
    words: list[str] = document["arguments"]
    return words[words.index(flag) + 1] if flag in words else None


@pytest.mark.parametrize("name", ["kvq", "kvq2", "g4q"])
@pytest.mark.parametrize(("engine", "stored"), [("vllm", "fp8_e4m3"), ("sglang", "fp8_e4m3"), ("trtllm", None)])
def test_flags_follow_a_checkpoints_own_kv_cache(run: Any, name: str, engine: str, stored: str | None) -> None:
    explained = ask(run, "explain", name).json
    assert {layer["plan"]["cache_dtype"] for layer in explained["layers"]} == {"fp8_e4m3"}
    found = ask(run, f"flags --engine {engine}", name).json
    assert argument(found, "--kv-cache-dtype") == stored
    if stored is None:
        assert "fp8" in str(found["file"])
    plain = ask(run, "flags --engine vllm", name, "--kv-cache-dtype", "auto").json
    assert argument(plain, "--kv-cache-dtype") == "bfloat16"


def test_an_int8_kv_cache_has_an_error_of_its_own(run: Any, tmp_path: Path) -> None:
    scheme = '{"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": true}'
    quantized = f'{{"quant_method": "compressed-tensors", "kv_cache_scheme": {scheme}}}'
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "quantization_config": {quantized}}}')
    for command in ("explain", "flags --engine vllm"):
        result = run(*command.split(), "--model", str(tmp_path), "--gpu", "h100", "--json")
        assert result.code == 2
        assert result.json["error"]["code"] == "kv-cache-scheme"
