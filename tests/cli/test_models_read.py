"""What ``explain`` and ``flags`` make of a model's own config: its cache, its layers, what no kernel computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "explain.schema.json").read_text())
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


@pytest.mark.parametrize("name", ["qa", "qb", "q4"])
def test_sparse_layers_without_a_kernel_are_named_with_who_serves_them(run: Any, name: str) -> None:
    result = ask(run, "explain", name)
    assert result.code == 1
    jsonschema.validate(result.json, SCHEMA)
    (sparse,) = result.json["unserved"]
    assert (sparse["kind"], sparse["count"], sparse["bytes_per_token"]) == ("qsa", 2, 2048)
    assert [row["name"] for row in sparse["engines"]["vllm"]] == ["QWEN4_EXP_QSA_TRITON"]
    flags = ask(run, "flags --engine vllm", name)
    assert flags.code == 0
    assert [row["name"] for row in flags.json["unserved"][0]["engine_backends"]] == ["QWEN4_EXP_QSA_TRITON"]
    assert flags.json["arguments"] == ["--gdn-prefill-backend", "flashinfer", "--dtype", "bfloat16"]
    assert ask(run, "flags --engine trtllm", name).code == 1
    text = run("explain", "--model", str(TRIAL / f"{name}.json"), "--gpu", "h100").out
    assert "qsa × 2" in text
    assert "vLLM 0.33.0: QWEN4_EXP_QSA_TRITON" in text


@pytest.mark.parametrize(
    ("gpu", "names"),
    [
        ("h100", ["FLASHMLA_SPARSE_DSV4"]),
        ("b200", ["FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4"]),
        ("rtx5090", ["FLASHINFER_MLA_SPARSE_DSV4"]),
        ("a100", []),
    ],
)
def test_a_model_without_any_layer_that_is_served(run: Any, tmp_path: Path, gpu: str, names: list[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4", "dtype": "bfloat16"}')
    result = run("explain", "--model", str(tmp_path), "--gpu", gpu, "--json")
    assert result.code == 1
    jsonschema.validate(result.json, SCHEMA)
    assert result.json["layers"] == []
    for sparse in result.json["unserved"]:
        assert [row["name"] for row in sparse["engines"]["vllm"]] == names
        assert [row["default"] for row in sparse["engines"]["vllm"]] == [True, False][: len(names)]
    assert run("flags", "-e", "vllm", "--model", str(tmp_path), "--gpu", gpu, "--json").code == (0 if names else 1)
    refused = run("matrix", "--model", str(tmp_path), "--gpu", gpu, "--json")
    assert refused.code == 2
    assert "deepseek_v4_csa" in refused.json["error"]["message"]


def test_a_bias_in_the_scores_is_a_reason_and_no_argument_forces_a_backend(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "dtype": "bfloat16"}')
    result = run("explain", "--model", str(tmp_path), "--gpu", "h100", "--json")
    assert result.code == 1
    by_kind = {layer["kind"]: layer for layer in result.json["layers"]}
    assert set(by_kind["full_attention"]["selected"].values()) == {None}
    codes = [
        {reason["code"] for reason in candidate["phases"]["decode"]["reasons"]}
        for candidate in by_kind["full_attention"]["candidates"]
    ]
    assert all(found & {"position-bias", "mla-only", "sparse-only"} for found in codes)
    found = run("flags", "--engine", "vllm", "--model", str(tmp_path), "--gpu", "h100", "--json")
    assert found.code == 1
    # Cross-attention has no bias: it alone is told what to take.
    assert argument(found.json, "--attention-backend") is None
    assert argument(found.json, "--attention-config.backend_per_kind.cross_attention") == "FLASH_ATTN"
    sglang = run("flags", "--engine", "sglang", "--model", str(tmp_path), "--gpu", "h100", "--json")
    assert argument(sglang.json, "--attention-backend") is None
