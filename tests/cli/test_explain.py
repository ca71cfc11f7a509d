"""``attn-select explain`` on real models, GPUs and facts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "explain.schema.json").read_text())

# Model, GPU, more options → backend per layer kind (prefill, decode), in the order of the model's kinds.
DECISIONS = [
    ("deepseek-v3", "h100", ["--kv-cache-dtype", "fp8", "--no-times"], [("FLASH_ATTN_MLA", "FLASHMLA")]),
    ("deepseek-v3", "b200", [], [("FLASH_ATTN_MLA", "FLASHINFER_MLA")]),
    ("deepseek-v3", "rtx5090", [], [("FLASH_ATTN_MLA", "TRITON_MLA")]),
    ("deepseek-v3", "cpu", [], [("TORCH_MLA", "TORCH_MLA")]),
    ("deepseek-v3.2", "h100", ["--kv-cache-dtype", "fp8", "--no-times"], [("FLASHMLA_SPARSE", "FLASHMLA_SPARSE")]),
    ("glm-5.3-flash", "h100", [], [("FLA", "TRITON_STATE"), ("TRITON_MLA_SPARSE", "TRITON_MLA_SPARSE")]),
    ("glm-5.3-flash", "b200", [], [("FLA", "TRITON_STATE"), ("TRITON_MLA_SPARSE", "TRITON_MLA_SPARSE")]),
    ("kimi-k3", "h100", ["--no-times"], [("FLA", "TRITON_STATE"), ("FLASH_ATTN_MLA", "FLASH_ATTN_MLA")]),
    ("llama-4-scout", "h100", ["--no-times"], [("FLASH_ATTN", "FLASH_ATTN")] * 2),
    ("gemma-4", "h100", ["--no-times"], [("FLASH_ATTN", "FLASH_ATTN"), ("FLASHINFER", "FLASHINFER")]),
    ("deepseek-v3.2", "b200", ["--kv-cache-dtype", "fp8"], [("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE")]),
    ("llama-3-8b", "b200", [], [("FLASHINFER", "FLASHINFER")]),
    ("llama-3-8b", "h100", ["--no-times"], [("FLASH_ATTN", "FLASH_ATTN")]),
    ("llama-3-8b", "a100", [], [("FLASH_ATTN", "FLASH_ATTN")]),
    ("llama-3-8b", "t4", [], [("TRITON_ATTN", "TRITON_ATTN")]),
    ("gpt-oss-120b", "rtx5090", [], [("FLASHINFER", "FLASHINFER")] * 2),
    ("gemma-3-27b", "a100", [], [("TRITON_ATTN", "TRITON_ATTN")] * 2),
    ("bert-base", "t4", [], [("TRITON_ATTN",)]),
    ("whisper-large-v3", "a100", [], [("FLASH_ATTN",), ("FLASH_ATTN", "FLASH_ATTN"), ("FLASH_ATTN", "FLASH_ATTN")]),
    ("bloom", "h100", ["--no-times"], [("FLASH_ATTN", "FLASH_ATTN")]),
]


@pytest.mark.parametrize(
    ("model", "gpu", "more", "expected"), DECISIONS, ids=lambda v: v if isinstance(v, str) else None
)
def test_decisions_for_well_known_models(
    run: Any, model: str, gpu: str, more: list[str], expected: list[tuple[str, ...]]
) -> None:
    result = run("explain", "--model", model, "--gpu", gpu, *more, "--with", "torch==2.13.0", "--json")
    assert result.code == 0
    jsonschema.validate(result.json, SCHEMA)
    assert [tuple(layer["selected"].values()) for layer in result.json["layers"]] == expected


def test_text_and_json_say_the_same(run: Any) -> None:
    arguments = ("explain", "--model", "gpt-oss-120b", "--gpu", "h100")
    text, data = run(*arguments, "--full"), run(*arguments, "--json")
    for layer in data.json["layers"]:
        assert f"{layer['kind']} × {layer['count']}" in text.out
        for candidate in layer["candidates"]:
            assert candidate["backend"] in text.out
            reasons = [reason for phase in candidate["phases"].values() for reason in phase["reasons"]]
            # What never serves such a layer is folded, once for all phases: "11 others serve MLA layers only: ...".
            other_kind = [reason for reason in reasons if reason["code"] == "mla-only"]
            for reason in other_kind or reasons:
                assert reason["message"].replace("serves", "serve") in text.out.replace("serves", "serve")
        shown = [rule for rule in layer["rules"] if rule["effect"] == "priority"]
        assert shown
        assert all(f":{rule['line']}" in text.out and (rule["because"] or "") in text.out for rule in shown)


def test_the_explicit_choice_that_cannot_run_is_exit_1_with_its_reasons(run: Any) -> None:
    result = run("explain", "--model", "deepseek-v3", "--gpu", "h100", "--backend", "CUTLASS_MLA")
    assert result.code == 1
    assert "CUTLASS_MLA" in result.out
    assert "compute capability 9.0 (supported: 10" in result.out
    assert "CUTLASS_MLA, asked for by name, cannot run this" in result.out
    data = run(
        "explain", "--model", "deepseek-v3", "--gpu", "h100", "--backend", "CUTLASS_MLA", "--no-times", "--json"
    ).json
    assert data["layers"][0]["selected"] == {"prefill": "FLASH_ATTN_MLA", "decode": None}


def test_without_a_gpu_auto_is_the_cpu_and_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run("explain", "--model", "llama-3-8b", "--with", "torch==2.13.0", "--json")
    assert result.code == 0
    assert result.json["device"]["name"] == "cpu"
    assert any("CPU" in warning for warning in result.json["warnings"])
    assert result.json["layers"][0]["selected"] == {"prefill": "TORCH_SDPA", "decode": "TORCH_SDPA"}


def test_a_layer_given_by_flags(run: Any) -> None:
    layer = "--num-heads 64 --num-kv-heads 8 --head-size 128 --gpu sm90 --tensor-parallel 8"
    result = run("explain", *layer.split(), "--json")
    assert result.code == 0
    assert result.json["model"] is None
    assert result.json["layers"][0]["config"]["num_heads"] == 8
    assert result.json["layers"][0]["config"]["num_kv_heads"] == 1


def test_a_rules_file_changes_the_decision_and_is_named(run: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'version = 1\n\n[[rules]]\nname = "x"\nprefer = ["TRITON_ATTN"]\nbecause = "we like it"\n'
    )
    for form in ((), ("--full",)):
        result = run("explain", "--model", "llama-3-8b", "--gpu", "h100", "--rules", "mine.toml", *form)
        assert result.code == 0
        assert re.search(r"1  TRITON_ATTN +selected" if form else r"(prefill|decode) +TRITON_ATTN  ", result.out)
        assert "mine.toml:3" in result.out
        assert "we like it" in result.out
    assert "hopper-window-prefill" not in result.out  # it prefers nothing for a layer without a window


def test_without_full_it_is_the_plan_and_one_line_for_each_rejected_backend(run: Any) -> None:
    arguments = ("explain", "--model", "deepseek-v3", "--gpu", "h100", "--kv-cache-dtype", "fp8")
    brief, layer = run(*arguments).out, run(*arguments, "--json").json["layers"][0]
    assert "Candidates" not in brief
    lines = brief[brief.index("  rejected  ") :].splitlines()
    assert [line[19:] for line in lines] == [
        "FLASH_ATTN_MLA for decode: KV-cache dtype fp8_e4m3 (supported: auto, bfloat16); try --kv-cache-dtype auto",
        "FLASHMLA for prefill: serves decode only",
        "FLASHINFER_MLA_CUTE_DSL: compute capability 9.0 (supported: 10.0, 10.3)",
        "CUTLASS_MLA: compute capability 9.0 (supported: 10.0, 10.3)",
        "12 others serve other layers (--full names them)",
    ]
    other_kinds = ("mla-unsupported", "sparse-only")
    for candidate in layer["candidates"]:
        reasons = [phase["reasons"] for phase in candidate["phases"].values()]
        rejected = any(reasons) and not any(each["code"] in other_kinds for phase in reasons for each in phase)
        assert sum(candidate["backend"] in re.findall(r"\w+", line) for line in lines) == rejected
    asked = ("explain", "--model", "deepseek-v3", "--gpu", "t4", "--backend", "FLASH_ATTN")
    assert re.search(r"FLASH_ATTN: serves no MLA layers \(and \d more reasons?\)", run(*asked).out)
    both = run("explain", "--model", "llama-3-8b", "--full", "--json")
    assert (both.code, both.json["error"]["code"]) == (2, "usage")
    assert "--full and --json contradict each other" in both.json["error"]["message"]


BAD = [
    (["--model", "lama-3-8b"], "llama-3-8b"),
    (["--model", "llama-3-8b", "--gpu", "h1000"], "h100"),
    (["--model", "llama-3-8b", "--backend", "FLASH_ATEN"], "FLASH_ATTN"),
    (["--model", "llama-3-8b", "--block-size", "0"], "block_size = 0"),
    (["--model", "llama-3-8b", "--tensor-parallel", "3"], "3"),
    (["--model", "llama-3-8b", "--with", "torch"], "NAME==VERSION"),
    (["--model", "llama-3-8b", "--rules", "nowhere.toml"], "nowhere.toml"),
    (["--num-heads", "32"], "head"),
    ([], "--model"),
    (["--num-heads", "32", "--num-kv-heads", "5", "--head-size", "64"], "num_kv_heads 5 must divide num_heads 32"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=lambda v: " ".join(v) if isinstance(v, list) else None)
def test_bad_input_is_one_clear_message_and_exit_2(run: Any, arguments: list[str], said: str) -> None:
    result = run("explain", *arguments)
    assert result.code == 2
    assert result.out == ""
    assert said in result.err
    assert "Traceback" not in result.err
    as_json = run("explain", *arguments, "--json")
    assert as_json.code == 2
    jsonschema.validate(as_json.json, SCHEMA)
    assert as_json.json["error"]["message"]


def test_an_internal_bug_is_exit_3(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_select_cli import explanation

    def broken(name: str) -> Any:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(explanation, "load", broken)
    monkeypatch.setenv("ATTN_SELECT_TRACEBACK", "0")
    result = run("explain", "--model", "llama-3-8b")
    assert result.code == 3
    assert "ZeroDivisionError: boom" in result.err
    assert "ATTN_SELECT_TRACEBACK" in result.err


def test_ranks_and_what_they_cost(run: Any) -> None:
    asked = ["explain", "--model", "llama-3-8b", "--gpu", "h200", "--dcp", "2", "--workload", "1q1s128k"]
    assert "2 share the cache: 2048 of 4096 bytes" in run(*asked).out
    found = run(*asked, "--json").json
    jsonschema.validate(found, SCHEMA)
    ranks = found["layers"][0]["plan"]["ranks"]
    assert (ranks["size"], [step["batch"] for step in ranks["steps"]]) == (2, ["q1s128k"])


def test_a_model_type_that_is_not_known_is_not_assumed(run: Any, tmp_path: Path) -> None:
    """Its plan would be that of another model; who says so gets one, with a warning."""
    config = {"model_type": "brandnew", "num_attention_heads": 8, "hidden_size": 1024, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("explain", "--model", str(tmp_path), "--gpu", "h100")
    refused = run(*asked)
    assert (refused.code, refused.out) == (1, "")
    assert "model type 'brandnew' is not known" in refused.err
    assert "--assume-attention" in refused.err
    assert run(*asked, "--json").json["error"]["code"] == "unknown-model-type"
    assumed = run(*asked, "--assume-attention")
    assert assumed.code == 0
    assert "model type 'brandnew' is not known: read as a Llama-like decoder" in assumed.err
