"""``attn-select explain`` on real models, GPUs and facts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "explain.schema.json").read_text())

# Model, GPU, more options → backend per layer kind (prefill, decode), in the order of the model's kinds.
DECISIONS = [
    ("deepseek-v3", "h100", ["--kv-cache-dtype", "fp8", "--no-times"], [("FLASH_ATTN_MLA", "FLASHMLA")]),
    ("deepseek-v3", "h100", ["--no-times"], [("FLASH_ATTN_MLA", "FLASH_ATTN_MLA")]),
    ("deepseek-v3", "b200", [], [("FLASH_ATTN_MLA", "FLASHINFER_MLA")]),
    ("deepseek-v3", "rtx5090", [], [("FLASH_ATTN_MLA", "TRITON_MLA")]),
    ("deepseek-v3", "cpu", [], [("TORCH_MLA", "TORCH_MLA")]),
    ("deepseek-v3.2", "h100", ["--kv-cache-dtype", "fp8", "--no-times"], [("FLASHMLA_SPARSE", "FLASHMLA_SPARSE")]),
    ("deepseek-v3.2", "h100", [], [("FLASH_ATTN_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")]),
    ("glm-5.3-flash", "h100", [], [("FLA", "FLA"), ("FLASH_ATTN_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")]),
    ("deepseek-v3.2", "a100", [], [("TRITON_MLA_SPARSE", "TRITON_MLA_SPARSE")]),
    ("glm-5", "h100", [], [("FLASH_ATTN_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE")]),
    ("glm-5", "b200", [], [("FLASHMLA_SPARSE", "FLASHMLA_SPARSE")]),
    ("glm-5.3-flash", "b200", [], [("FLA", "FLA"), ("TRITON_MLA_SPARSE", "TRITON_MLA_SPARSE")]),
    ("kimi-k3", "h100", ["--no-times"], [("FLA", "FLA"), ("FLASH_ATTN_MLA", "FLASH_ATTN_MLA")]),
    ("kimi-k3", "b200", [], [("FLA", "FLA"), ("FLASH_ATTN_MLA", "FLASHINFER_MLA")]),
    ("llama-4-scout", "h100", ["--no-times"], [("FLASH_ATTN", "FLASH_ATTN")] * 2),
    ("llama-4-scout", "b200", [], [("FLASHINFER", "FLASHINFER")] * 2),
    ("gemma-4", "b200", [], [("FLASHINFER", "FLASHINFER")] * 2),
    ("gemma-4", "h100", ["--no-times"], [("FLASH_ATTN", "FLASH_ATTN"), ("FLASHINFER", "FLASHINFER")]),
    ("deepseek-v3.2", "b200", ["--kv-cache-dtype", "fp8"], [("FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE")]),
    ("deepseek-v3.2", "b200", [], [("FLASHMLA_SPARSE", "FLASHMLA_SPARSE")]),
    ("llama-3-8b", "b200", [], [("FLASHINFER", "FLASHINFER")]),
    ("llama-3-8b", "h100", ["--no-times"], [("FLASH_ATTN", "FLASH_ATTN")]),
    ("llama-3-8b", "a100", [], [("FLASH_ATTN", "FLASH_ATTN")]),
    ("llama-3-8b", "t4", [], [("TRITON_ATTN", "TRITON_ATTN")]),
    ("gpt-oss-120b", "rtx5090", [], [("FLASHINFER", "FLASHINFER")] * 2),
    ("gpt-oss-120b", "h100", ["--no-times"], [("FLASH_ATTN", "FLASH_ATTN")] * 2),
    ("gemma-3-27b", "a100", [], [("TRITON_ATTN", "TRITON_ATTN")] * 2),
    ("gemma-2-27b", "a100", [], [("FLASH_ATTN", "FLASH_ATTN")] * 2),
    ("bert-base", "t4", [], [("TRITON_ATTN",)]),
    ("phi-3-mini", "a100", [], [("FLASH_ATTN", "FLASH_ATTN")]),
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


@pytest.mark.parametrize(
    ("model", "more", "backend"),
    [
        ("deepseek-v3", (), "FLASHINFER_MLA"),
        ("deepseek-v3", ("--kv-cache-dtype", "fp8"), "FLASHMLA"),
        ("deepseek-v3.2", ("--kv-cache-dtype", "fp8"), "TRITON_MLA_SPARSE"),
        ("llama-3-8b", (), "TRITON_ATTN"),
    ],
)
@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_times_decide_decodes_on_surveyed_gpus(
    run: Any, model: str, more: tuple[str, ...], backend: str, gpu: str
) -> None:
    """The chosen one is ahead of all others by several per cent."""
    layer = run("explain", "--model", model, "--gpu", gpu, *more, "--json").json["layers"][-1]
    assert layer["evidence"]["phases"]["decode"]["by_times"]
    assert layer["selected"]["decode"] == backend
    behind = [candidate["phases"]["decode"]["behind"] for candidate in layer["candidates"]]
    assert sorted(each for each in behind if each is not None)[1] > 1.04


@pytest.mark.parametrize(("gpu", "backend"), [("a100", "FLASH_ATTN"), ("b200", "FLASHINFER")])
def test_minimax_m3_has_a_backend_and_its_sparse_layers_lack_a_kernel(
    run: Any, tmp_path: Path, gpu: str, backend: str
) -> None:
    text = {"model_type": "minimax_m3_vl_text"}

    def explained(**fields: Any) -> Any:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "minimax_m3_vl", "text_config": {**text, **fields}})
        )
        return run("explain", "--model", str(tmp_path), "--gpu", gpu, "--json")

    assert [set(layer["selected"].values()) for layer in explained().json["layers"]] == [{backend}]
    sparse = explained(layer_types=["minimax_m3_sparse"] * 60)
    assert sparse.code == 1
    assert [(each["kind"], each["count"]) for each in sparse.json["unserved"]] == [("msa", 60)]


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


def test_rules_choose_the_phase_that_the_explicit_choice_leaves_open(run: Any) -> None:
    result = run(
        "explain", "--model", "deepseek-v3", "--gpu", "h100", "--no-times", "--backend", "decode=FLASHMLA", "--json"
    )
    assert result.code == 0
    assert result.json["layers"][0]["selected"] == {"prefill": "FLASH_ATTN_MLA", "decode": "FLASHMLA"}
    assert result.json["layers"][0]["plan"]["block_size"] == 64


def test_without_a_gpu_auto_is_the_cpu_and_says_so(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run("explain", "--model", "llama-3-8b", "--with", "torch==2.13.0", "--json")
    assert result.code == 0
    assert result.json["device"]["name"] == "cpu"
    assert any("CPU" in warning for warning in result.json["warnings"])
    assert result.json["layers"][0]["selected"] == {"prefill": "TORCH_SDPA", "decode": "TORCH_SDPA"}


def test_a_layer_given_by_flags(run: Any) -> None:
    result = run(
        "explain",
        "--num-heads",
        "64",
        "--num-kv-heads",
        "8",
        "--head-size",
        "128",
        "--gpu",
        "sm90",
        "--tensor-parallel",
        "8",
        "--json",
    )
    assert result.code == 0
    assert result.json["model"] is None
    assert result.json["layers"][0]["config"]["num_heads"] == 8
    assert result.json["layers"][0]["config"]["num_kv_heads"] == 1


def test_mla_by_flags_takes_deepseeks_dims(run: Any) -> None:
    result = run("explain", "--mla", "--num-heads", "128", "--gpu", "h100", "--json")
    config = result.json["layers"][0]["config"]
    assert (config["head_size"], config["qk_nope_head_dim"], config["v_head_dim"]) == (576, 128, 128)


def test_flags_override_the_model(run: Any) -> None:
    result = run(
        "explain", "--model", "llama-3-8b", "--gpu", "h100", "--dtype", "float16", "--block-size", "32", "--json"
    )
    assert result.json["layers"][0]["config"]["dtype"] == "float16"
    assert result.json["layers"][0]["plan"]["block_size"] == 32


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


def test_a_rule_without_effect_is_left_out(run: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'version = 1\n[[rules]]\nname = "idle"\nprefer = ["FLASHMLA"]\n'
        '[[rules]]\nname = "deny"\ndeny = ["TRITON_ATTN"]\n'
    )
    asked = ("explain", "--model", "llama-3-8b", "--gpu", "h100", "--rules", "mine.toml")
    for form in ((), ("--full",)):
        out = run(*asked, *form).out
        assert "deny (deny)" in out
        assert "idle (prefer)" not in out


def test_a_model_with_several_kinds_names_what_serves_others_once(run: Any) -> None:
    asked = ("explain", "--model", "gemma-3-27b", "--gpu", "h100")
    short, full = run(*asked).out, run(*asked, "--full").out
    assert short.count("12 others serve other layers") == full.count("others serve MLA layers only") == 1
    assert "CUTLASS_MLA" not in short
    assert len(short.splitlines()) < 40 < len(full.splitlines())


def test_several_models_and_gpus(run: Any) -> None:
    arguments = ("explain", "--model", "llama-3-8b", "--model", "bert-base", "--gpu", "h100", "--gpu", "t4")
    result = run(*arguments, "--json")
    jsonschema.validate(result.json, SCHEMA)
    found = [(e["model"]["name"], e["device"]["name"]) for e in result.json["explanations"]]
    assert found == [("llama-3-8b", "h100"), ("llama-3-8b", "t4"), ("bert-base", "h100"), ("bert-base", "t4")]
    text = run(*arguments).out
    assert [line.split()[1] for line in text.splitlines() if line.startswith("Model ")] == [name for name, _ in found]
    wrong = run("explain", "--model", "llama-3-8b", "--model", "./nowhere.json", "--gpu", "h100")
    assert wrong.code == 2
    assert "error: ./nowhere.json: no such file or folder" in wrong.err
    unset = run("explain", "--model", "llama-3-8b", "--gpu", "")
    assert (unset.code, unset.out) == (2, "")
    assert "error: unknown gpu ''" in unset.err
    wrong = run("explain", "--model", "llama-3-8b", "--model", "bert-base", "--gpu", "h100", "-tp", "3")
    assert "error: llama-3-8b on h100: tensor_parallel_size = 3" in wrong.err


def test_what_never_serves_such_a_layer_is_one_line(run: Any) -> None:
    out = run("explain", "--model", "deepseek-v3", "--gpu", "h100", "--full").out
    names = "CUDNN_ATTN, FLASH_ATTN, FLASHINFER, TORCH_SDPA, FLEX_ATTENTION, TRITON_ATTN, PAGED_ATTENTION"
    assert out.count(f"     -  7 others serve no MLA layers: {names}\n") == 1
    assert "serves no MLA layers" not in out
    cpu = run("explain", "--model", "llama-3-8b", "--gpu", "cpu", "--full").out
    assert "others need a GPU: FLASH_ATTN, FLASHINFER, TRITON_ATTN, PAGED_ATTENTION, CUDNN_ATTN" in cpu
    # Asked for by name, a backend is never folded: all that speaks against it is shown.
    asked = run("explain", "--model", "deepseek-v3", "--gpu", "h100", "--backend", "FLASH_ATTN", "--full").out
    assert re.search(r"FLASH_ATTN +rejected +serves no MLA layers", asked)
    assert "6 others serve no MLA layers" in asked


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
    (["--model", "llama-3-8b", "--gpu", "sm44"], "no CUDA GPU has compute capability 4.4"),
    (["--model", "llama-3-8b", "--backend", "FLASH_ATEN"], "FLASH_ATTN"),
    (["--model", "llama-3-8b", "--backend", "decod=FLASH_ATTN"], "decode"),
    (["--model", "llama-3-8b", "--kv-cache-dtype", "int3"], "kv_cache_dtype = 'int3'"),
    (["--model", "llama-3-8b", "--block-size", "0"], "block_size = 0"),
    (["--model", "llama-3-8b", "--block-size", "x"], "'x' is not a valid integer"),
    (["--model", "llama-3-8b", "--tensor-parallel", "3"], "3"),
    (["--model", "llama-3-8b", "--tensor-parallel", "0"], "0"),
    (["--model", "llama-3-8b", "--with", "torch"], "NAME==VERSION"),
    (["--model", "llama-3-8b", "--with", "torch==x.y"], "NAME==VERSION"),
    (["--model", "llama-3-8b", "--rules", "nowhere.toml"], "nowhere.toml"),
    (["--model", "./nowhere/config.json"], "nowhere"),
    (["--num-heads", "32"], "head"),
    ([], "--model"),
    (["--num-heads", "32", "--num-kv-heads", "5", "--head-size", "64"], "num_kv_heads 5 must divide num_heads 32"),
    (["--num-heads", "32", "--head-size", "64", "--sparse-top-k", "64"], "sparse_top_k"),
    (["--nonsense"], "--nonsense"),
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


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no such owner here")
@pytest.mark.parametrize("command", ["explain --model gemma-3-27b --gpu h100", "run --head-size 32 --num-heads 2"])
def test_rules_of_another_user_are_named_once(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "selector_rules.toml").write_text("version = 1\n[backends.FLASH_ATTN]\nversion = 2\n")
    assert "another user" not in run(*command.split()).err
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert run(*command.split()).err.count("it belongs to another user") == 1
