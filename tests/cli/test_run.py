"""``attn-select run``: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a layer needs torch")

from attn_select.backends.registry import load_plugins
from attn_select.errors import BackendError
from attn_select.reference import oracle_paged
from attn_select_cli import progress, serving

SMALL = ("--num-heads", "4", "--num-kv-heads", "2", "--head-size", "32", "--prompt-tokens", "40", "--decode-steps", "3")
SHORT = ("--prompt-tokens", "20", "--decode-steps", "2", "--requests", "2")
CPU_ONLY = pytest.mark.skipif(serving.torch.cuda.is_available(), reason="pinned to what a CPU selects")


@CPU_ONLY
def test_one_layer_is_served_in_chunks_and_checked(run: Any) -> None:
    result = run("run", *SMALL, "--max-num-batched-tokens", "32")
    assert result.code == 0
    assert "TORCH_SDPA" in result.out
    said = r"4 requests of 2\d to 40 prompt tokens, then 3 decode steps each; at most 32 tokens a step"
    assert re.search(said, result.out)
    rows = [line.split() for line in result.out.splitlines() if line.endswith("within")]
    assert [row[0] for row in rows] == ["prefill", "mixed", "decode"]
    assert "bound" in result.out


@CPU_ONLY
@pytest.mark.parametrize(
    "options",
    [
        ("--kv-cache-dtype", "fp8"),
        ("--sliding-window", "9", "--sinks", "--dtype", "float32"),
        ("--alibi", "--soft-cap", "30", "--dtype", "float16"),
        ("--non-causal", "--v-head-size", "16"),
        ("--per-head-quant-scales", "--kv-cache-dtype", "fp8_e5m2"),
        ("--batch-invariant", "--block-size", "32"),
    ],
)
def test_every_kind_of_layer_is_within_its_bound(run: Any, options: tuple[str, ...]) -> None:
    data = run("run", *SMALL, *options, "--json").json
    assert data["ok"]
    (layer,) = data["layers"]
    assert layer["run"]["ok"]
    for step in layer["run"]["steps"]:
        assert 0 < step["error"]["norm"] <= layer["run"]["bound"]["norm"]


@CPU_ONLY
@pytest.mark.parametrize("head_size", ["1", "32"])
@pytest.mark.parametrize("rows", ["the last row", "every row"])
def test_a_row_that_is_off_by_a_twentieth_is_above(
    run: Any, monkeypatch: pytest.MonkeyPatch, head_size: str, rows: str
) -> None:
    reference = oracle_paged.attention_reference

    def off(*tensors: Any, **options: Any) -> Any:
        output, lse = reference(*tensors, **options)
        output[-1 if rows == "the last row" else slice(None)] *= 1.05
        return output, lse

    asked = ("run", "--num-heads", "1", "--head-size", head_size, "--prompt-tokens", "60")
    assert run(*asked).code == 0
    monkeypatch.setattr(oracle_paged, "attention_reference", off)
    assert run(*asked).code == 1


@CPU_ONLY
def test_json_counts_the_tokens_and_the_cache(run: Any) -> None:
    data = run("run", *SMALL, "--requests", "2", "--seed", "3", "--json").json
    assert data["schema_version"] == 1
    assert data["workload"] == {
        "num_requests": 2,
        "prompt_tokens": 40,
        "decode_steps": 3,
        "max_num_batched_tokens": 192,
        "seed": 3,
    }
    ran = data["layers"][0]["run"]
    assert sum(step["tokens"] for step in ran["steps"]) == sum(ran["prompts"]) + 2 * 3
    assert ran["prompts"][0] == 40
    assert ran["cache_bytes"] == ran["num_blocks"] * 16 * 2 * 2 * 32 * 2
    assert data["layers"][0]["plan"]["phases"]["decode"]["backend"] == "TORCH_SDPA"


@CPU_ONLY
@pytest.mark.parametrize(
    ("model", "backends"),
    [
        ("llama-3-8b", {"TORCH_SDPA"}),
        ("deepseek-v3.2", {"TORCH_MLA_SPARSE"}),
    ],
)
def test_models(run: Any, model: str, backends: set[str]) -> None:
    data = run("run", "--model", model, *SHORT, "--json").json
    assert data["ok"]
    assert {name for layer in data["layers"] for name in layer["selected"].values()} == backends


@CPU_ONLY
@pytest.mark.parametrize(
    ("flags", "without"),
    [
        (("--mm-prefix",), {"mm_prefix_ranges": ()}),
        (("--draft-tree", "--speculative-tokens", "5", "--decode-steps", "9"), {"tree_mask": None}),
    ],
    ids=["image", "tree"],
)
def test_images_and_trees_of_drafts_are_masked(
    run: Any, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], without: dict[str, Any]
) -> None:
    """Also where a chunk of the prompt ends inside the image; a reference without the mask is another one."""
    asked = ("run", *SMALL, *flags, "--prompt-tokens", "60", "--max-num-batched-tokens", "30")
    assert run(*asked).code == 0
    reference = oracle_paged.attention_reference

    def unmasked(*tensors: Any, **options: Any) -> Any:
        return reference(*tensors, **{**options, **without})

    monkeypatch.setattr(oracle_paged, "attention_reference", unmasked)
    result = run(*asked)
    assert result.code == 1
    assert "ABOVE" in result.out


@CPU_ONLY
@pytest.mark.parametrize("variables", [{}, {"ATTN_SELECT_TRACEBACK": "1"}], ids=["told", "traceback"])
def test_a_backend_that_fails_is_named(run: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    spec = load_plugins().specs["TORCH_SDPA"]

    def forward(*_: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(spec.get_class().impl_cls, "forward", forward)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if variables:
        with pytest.raises(BackendError) as caught:
            run("run", *SMALL)
        assert isinstance(caught.value.__cause__, KeyError)
        return
    result = run("run", *SMALL)
    assert result.code == 2
    assert f"error: backend TORCH_SDPA ({spec.distribution}): forward() raised KeyError: 'x'" in result.err
    assert "attn-select-torch" in spec.distribution
    assert "run it again" not in result.err
    as_json = run("run", *SMALL, "--json").json
    assert as_json["error"]["code"] == "backend-failed"


@CPU_ONLY
@pytest.mark.parametrize(("norm", "row", "code"), [(1e-12, 1.0, 1), (1.0, 1e-12, 1), (1.0, 1.0, 0)])
def test_one_error_above_its_bound_is_enough_for_exit_1(
    run: Any, monkeypatch: pytest.MonkeyPatch, norm: float, row: float, code: int
) -> None:
    """The norm's bound and the row's are judged each by itself, in the text, in JSON and by the exit code."""
    bound = serving.ErrorBound(norm, row, 1e-12, "made for this test")
    monkeypatch.setattr(serving, "error_bound", lambda *_: bound)
    result = run("run", *SMALL)
    assert result.code == code
    assert ("ABOVE" in result.out) == bool(code)
    as_json = run("run", *SMALL, "--json")
    assert as_json.code == code
    assert as_json.json["ok"] == as_json.json["layers"][0]["run"]["ok"] == (not code)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--model", "llama-3-8b", "--layer", "nope"), 2, "unknown layer kind 'nope'"),
        ((*SMALL, "--requests", "0"), 2, "'--requests': 0 is not in the range x>=1"),
        ((*SMALL, "--max-num-batched-tokens", "2"), 2, "max_num_batched_tokens = 2: accepted are integers from 4"),
        ((*SMALL, "--backend", "CUTLASS_MLA"), 1, "no backend for"),
        (("--prompt-tokens", "5"), 2, "which layer?"),
        (("--recurrence", "kda"), 2, "which layer? Give --model, or --num-heads and --head-size with --recurrence kda"),
    ],
)
def test_wrong_input_is_told(run: Any, arguments: tuple[str, ...], code: int, said: str) -> None:
    result = run("run", *arguments)
    assert result.code == code
    assert said in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "error",
    [MemoryError(), serving.torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_no_bug(run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(serving, "_Layer", full)
    result = run("run", *SMALL, "--prompt-tokens", "1000000")
    assert result.code == 2
    assert "not enough memory for num_requests = 4, prompt_tokens = 1000000" in result.err
    assert "take fewer --requests" in result.err
    monkeypatch.setattr(serving, "_Layer", lambda *_: 1 / 0)
    assert run("run", *SMALL).code == 3


@pytest.mark.parametrize("json", [(), ("--json",)])
def test_a_pipe_gets_progress_by_lines_with_an_end_in_sight(
    run: Any, monkeypatch: pytest.MonkeyPatch, json: tuple[str, ...]
) -> None:
    assert "s left" not in run("run", *SMALL, *json).err  # what is soon over is silent
    monkeypatch.setattr(progress, "EVERY", 0.0)
    result = run("run", *SMALL, *json)
    lines = [line for line in result.err.splitlines() if "s left" in line]
    assert len(lines) > 3
    assert re.fullmatch(r"full_attention: checking \d+ tokens: \d+ %, \d+ s, about \d+ s left", lines[0])
    assert ": 100 %, " in lines[-1]
    assert "s left" not in result.out
