"""The serving benches: what they draw, how they count agreement, and whole runs on a CPU where vLLM is installed."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from serve_arms import Arm, ArmError
from serve_requests import KINDS, agreement, drawn

BENCH = Path(__file__).parents[1] / "bench"
ON_A_CPU = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_those_of_their_kind_and_seed(kind: str) -> None:
    traffic, requests = KINDS[kind], drawn(kind, 3, 400)
    lengths = [len(prompt) for prompt, _ in requests]
    assert requests == drawn(kind, 3, 400)
    assert requests[0] != drawn(kind, 4, 1)[0]
    assert traffic.shortest <= min(lengths) <= max(lengths) <= traffic.longest
    assert statistics.median(lengths) == pytest.approx(traffic.median, rel=0.25)
    assert {new for _, new in requests} <= set(range(traffic.new[0], traffic.new[1] + 1))
    assert all(len(prompt) + new <= 60 and prompt and new for prompt, new in drawn(kind, 3, 100, 60))


def test_tokens_agree_up_to_the_first_difference() -> None:
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == 0.75


def dying(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Arm:
    """An arm whose process runs some code before anything else, and then ends."""
    (folder / "sitecustomize.py").write_text(f"import os, time\nprint('died early', flush=True)\n{code}\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return Arm("first", {}, folder / "serve-first.log")


def test_an_arm_that_ends_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArmError, match=r"serve-first ended; the end of its output:\ndied early"):
        dying("", tmp_path, monkeypatch).start()


def test_an_arm_that_hangs_is_told_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = dying("time.sleep(600)", tmp_path, monkeypatch)
    with pytest.raises(ArmError, match=r"serve-first said nothing in 0 s"):
        arm.start(limit=0.1)
    arm.end()


def bench(program: str, *options: str) -> str:
    """Run a bench with a tiny model; return what it printed."""
    command = [sys.executable, str(BENCH / program), *options, "--cache-gib", "1"]
    variables = {"OMP_NUM_THREADS": "1", "ATTN_SELECT_RULES": str(Path(__file__).with_name("our_kernels.toml"))}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow(guard="test_vllm_engine, of real engines; the tests above, of what is drawn and counted")
@ON_A_CPU
def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    options = ["--requests", "4", "--longest", "60", "--rounds", "1", "--kinds", "mixed", "--logs", str(tmp_path)]
    printed = bench("serve.py", "tiny", *options, "--speculate", "ngram:2")
    assert "tiny, attn-select: " in printed
    assert "layers {'ATTN_SELECT_TORCH_SDPA': 3}" in printed
    assert re.search(r"attn-select +\d+ tokens/s, ratio \d\.\d+ \(.*\), tokens agree to 100%", printed)
    assert re.search(r"mixed, attn-select: \d\.\d+ in the geometric mean of 1 models", printed)


@pytest.mark.slow(guard="test_vllm_engine, of real engines in such settings; the tests above")
@ON_A_CPU
def test_settings_on_a_cpu(tmp_path: Path) -> None:
    """The head drafts what the model says, a CPU does not sleep, and two GPUs are not there."""
    options = ["--requests", "3", "--longest", "100", "--jobs", "2", "--also", "", "--logs", str(tmp_path)]
    *_, table = bench("settings.py", "--model", "tiny", "--rows", "drafts-eagle,sleep,dcp", *options).partition(
        "All rows"
    )
    drafting, rest = table.split("\nsleep\n")
    ran = r"attn-select +ran, {'ATTN_SELECT_TORCH_SDPA': 2}, .*, tokens agree to 100%, (\d+) of (\d+) drafts accepted"
    found = re.search(ran, drafting)
    assert found is not None
    assert int(found[1]) > 0.5 * int(found[2])
    assert rest.count("FAILED") == rest.count("Sleep mode is not supported") == 2
    assert "dcp: skipped, takes 2 GPUs" in rest
