"""The serving bench: what it draws, how it counts agreement, and a whole run on a CPU where vLLM is installed."""

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

BENCH = Path(__file__).parents[1] / "bench" / "serve.py"


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


def test_an_arm_that_ends_early_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nprint('died early', flush=True)\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    arm = Arm("first", {}, "", tmp_path / "log")
    with pytest.raises(ArmError, match=r"first ended; the end of its output:\ndied early"):
        arm.start()


@pytest.mark.slow(guard="test_vllm_engine, of real engines; the tests above, of what is drawn and counted")
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    options = ["--requests", "4", "--longest", "60", "--rounds", "1", "--kinds", "mixed", "--cache-gib", "1"]
    command = [sys.executable, str(BENCH), "tiny", *options, "--drafts", "2", "--logs", str(tmp_path)]
    variables = {"OMP_NUM_THREADS": "1", "ATTN_SELECT_RULES": str(Path(__file__).with_name("our_kernels.toml"))}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tiny, attn-select: " in done.stdout
    assert "layers {'ATTN_SELECT_TORCH_SDPA': 3}" in done.stdout
    assert re.search(r"attn-select +\d+ tokens/s, ratio \d\.\d+ \(.*\), tokens agree to 100%", done.stdout)
    assert re.search(r"mixed, attn-select: \d\.\d+ in the geometric mean of 1 models", done.stdout)
