"""A stranger's plugin: its facts, its rules, its runtime and its tests as the documentation shows them.

Installed with pip it is listed, selected by a rule, explained, and held to its word; removed, nothing stays.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).parents[2] / "examples" / "acme_attention"
RULE = """
version = 1
[[rules]]
name = "try-acme"
when = { mla = false, gpu = "h100" }
prefer = ["ACME_ATTN"]
because = "we trust Acme"
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a Python in a fresh environment that also sees this one's packages."""
    root = tmp_path_factory.mktemp("third-party")
    venv.create(root / "venv", with_pip=False)
    python = root / "venv" / "bin" / "python"
    site = next((root / "venv" / "lib").glob("python*/site-packages"))
    (site / "outer.pth").write_text("\n".join(p for p in sys.path if p and Path(p).is_dir()))
    environment = {**os.environ, "XDG_CONFIG_HOME": str(root), "NO_COLOR": "1"}

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False
        )

    return call


def _attn_select(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-c", "from attn_select_cli.main import main; main()", *arguments)


def _shown(end: str) -> set[str]:
    """Return the lines of the documentation's block of plain text that has a line with this end."""
    text = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text("utf-8")
    blocks = [block.splitlines() for block in re.findall(r"(?ms)^```text\n(.*?)^```$", text)]
    return next(set(lines) for lines in blocks if any(line.endswith(end) for line in lines))


def _tested(run: Run, source: Path) -> set[str]:
    """Return the lines that pytest prints for the example's tests, without their marks."""
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(source / "test_acme_attention.py"))
    return {re.sub(r"^E +", "", line) for line in done.stdout.splitlines()}


def _files(run: Run) -> set[str]:
    listing = run(
        "-c", "import pathlib, sys; print(*sorted(map(str, pathlib.Path(sys.prefix).rglob('*'))), sep='\\n')"
    ).stdout
    return {line for line in listing.splitlines() if "__pycache__" not in line}


def test_a_backend_takes_fewer_than_150_lines() -> None:
    files = [*EXAMPLE.glob("acme_*.py")]
    assert len(files) == 2, "facts and runtime"
    assert sum(len(file.read_text().splitlines()) for file in files) < 150


def test_a_third_party_plugin_comes_and_goes(run: Run, tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLE, tmp_path / "acme")
    rules = tmp_path / "rules.toml"
    rules.write_text(RULE)
    explain = ("explain", "--model", "llama-3-8b", "--gpu", "h100", "--rules", str(rules), "--json")
    before = _files(run)

    done = run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", str(source))
    assert done.returncode == 0, done.stderr
    listed = json.loads(_attn_select(run, "backends", "--json").stdout)
    assert {"name": "ACME_ATTN", "state": "ready"}.items() <= next(
        b for b in listed["backends"] if b["name"] == "ACME_ATTN"
    ).items()
    assert any(p["distribution"] == "acme-attention" and p["version"] == "1.2.0" for p in listed["plugins"])
    answer = json.loads(_attn_select(run, *explain).stdout)
    layer = answer["layers"][0]
    assert layer["selected"] == {"prefill": "ACME_ATTN", "decode": "ACME_ATTN"}
    assert {"name": "try-acme", "effect": "prefer", "file": str(rules), "line": 3}.items() <= layer["rules"][-1].items()
    text = _attn_select(run, *explain[:-1], "--full").stdout
    assert "ACME_ATTN" in text
    assert "we trust Acme" in text
    alone = json.loads(_attn_select(run, *explain[:5], "--json").stdout)["layers"][0]["candidates"]
    ranks = {candidate["backend"]: candidate["phases"]["decode"]["rank"] for candidate in alone}
    assert ranks["ACME_ATTN"] == ranks["TORCH_SDPA"] - 1  # where its own spec says, with no rule
    rejected = _attn_select(
        run,
        "explain",
        "--num-heads",
        "64",
        "--num-kv-heads",
        "4",
        "--head-size",
        "80",
        "--gpu",
        "h100",
        "--backend",
        "ACME_ATTN",
        "--full",
    )
    assert rejected.returncode == 1
    assert "head size 80 (supported: 64, 128)" in rejected.stdout
    assert "more than 8 query heads per KV head" in rejected.stdout

    done = run("-m", "pip", "uninstall", "--quiet", "--yes", "acme-attention")
    assert done.returncode == 0, done.stderr
    assert _files(run) == before
    answer = json.loads(_attn_select(run, *explain).stdout)
    assert any("unknown backend 'ACME_ATTN'" in warning for warning in answer["warnings"])
    assert answer["layers"][0]["selected"]["decode"] != "ACME_ATTN"


@pytest.mark.slow(guard="test_conformance, which runs the example", ci=True)
def test_the_example_passes_as_the_documentation_shows(run: Run, tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLE, tmp_path / "acme")
    assert _shown("0 failed, 0 not run") <= _tested(run, source)


@pytest.mark.slow(guard="test_conformance_kernels.test_a_wrong_kernel_is_found", ci=True)
def test_the_suite_says_what_the_documentation_shows(run: Run, tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLE, tmp_path / "acme")
    runtime = source / "acme_runtime.py"
    right = runtime.read_text()
    runtime.write_text(right.replace("distance <= -window", "distance <= -window - 1"))
    assert runtime.read_text() != right
    assert _shown("sliding_window=33)") <= _tested(run, source)
