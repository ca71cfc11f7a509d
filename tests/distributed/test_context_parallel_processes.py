"""Context parallelism between processes, by gloo: conformance, whole models, and what happens when ranks go wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_programs as programs
import torch
from processes import run_processes

pytestmark = [pytest.mark.distributed, pytest.mark.long]


@pytest.mark.parametrize("suite", [programs.Sdpa, programs.Mla, programs.MlaSparse])
@pytest.mark.parametrize(("size", "num_layers"), [(2, 20), (4, 8)])
def test_backends_give_the_oracles_results(tmp_path: Path, suite: Any, size: int, num_layers: int) -> None:
    found = run_processes(size, tmp_path, programs.conformance, suite, num_layers)
    assert found == [[]] * size


@pytest.mark.parametrize(
    ("size", "name", "queries", "interleave"),
    [
        (2, "llama", "sharded", 1),
        (4, "llama", "replicated", 4),
        (2, "deepseek_v3", "sharded", 8),
        (4, "deepseek_v3", "sharded", 1),
        (2, "deepseek_v32", "sharded", 1),
    ],
)
def test_models_generate_the_tokens_of_one_process(
    tmp_path: Path, size: int, name: str, queries: str, interleave: int
) -> None:
    pytest.importorskip("transformers")
    import models_for_tests as models
    from paged_engine import NEW_TOKENS, PROMPTS, generated

    torch.manual_seed(0)
    model = models.built(getattr(models, name))
    prompts = [torch.randint(model.config.vocab_size, (length,)).tolist() for length in PROMPTS]
    with torch.inference_mode():
        alone = generated(model, prompts)
    assert all(len(text) == length + NEW_TOKENS for text, length in zip(alone, PROMPTS, strict=True))
    assert run_processes(size, tmp_path, programs.generation, name, prompts, queries, interleave) == [alone] * size


def test_different_lengths_in_checked_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in run_processes(2, tmp_path, programs.steps, [20, 21], environment={"ATTN_SELECT_CHECK": "1"}):
        assert text.startswith(
            "RankError: a step: the ranks of the group have different seq_lens (rank 0: [20], rank 1: [21])"
        )


def test_a_batch_that_one_rank_refuses(tmp_path: Path) -> None:
    refused, other = run_processes(2, tmp_path, programs.steps, [300, 20], environment={"ATTN_SELECT_CHECK": "1"})
    assert refused.startswith("BatchError: request 0: seq_lens = 300")
    assert other.startswith("RankError: ")


@pytest.mark.parametrize("how", ["ends", "waits"])
def test_a_rank_that_is_lost_ends_the_others_within_the_timeout(tmp_path: Path, how: str) -> None:
    found = run_processes(2, tmp_path, programs.steps, [20, 20], 1, how)
    assert found[0].startswith("RankError: all_gather failed on rank 0 of 2: ")
    assert "within the group's timeout" in found[0]
    assert found[1] is None or found[1].startswith("RankError")


def test_the_documented_program_prints_what_the_document_shows(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "docs" / "runtime.md").read_text("utf-8")
    block = re.search(r"(?ms)^```text\n\$ torchrun (.*?)\n(.*?)^```$", text)
    assert block is not None
    found = [sys.executable, "-m", "torch.distributed.run", "--standalone", *block[1].split()]
    done = subprocess.run(found, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == block[2]


def bench(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run ``attn-select bench`` in two processes; return the exit code, and what the first one printed."""
    given = ["--num-heads", "4", "--num-kv-heads", "2", "--head-size", "32", "--dtype", "float32", "--json"]
    given += ["--backend", "TORCH_SDPA", *arguments]
    program = "import sys; from attn_select_cli.main import run; sys.exit(run(sys.argv[1:]))"
    (folder / "bench.py").write_text(program, "utf-8")
    found = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*found, str(folder / "bench.py"), "bench", *given], capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout)


def test_bench_measures_over_the_processes_of_torchrun(tmp_path: Path) -> None:
    code, found = bench(tmp_path, "--dcp", "2", "--workload", "2q1s64,q20s60")
    assert code == 0
    (layer,) = found["layers"]
    assert [each["batch"] for each in layer["batches"]] == ["2q1s64", "q20s60"]
    assert all(each["backends"][0]["time_us"] > 0 for each in layer["batches"])
    assert layer["config"]["decode_context_parallel_size"] == 2


def test_bench_of_one_rank_in_two_processes_times_nothing(tmp_path: Path) -> None:
    code, found = bench(tmp_path, "--workload", "2q1s64")
    assert code == 1
    text = "its cache lies on 1 rank (--dcp 1), but 2 processes were started: see torchrun"
    assert found["layers"][0]["not_run"] == text
