"""A golden file of verdicts: what a plugin's facts say stands in it, and a change of one is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_toolkit import PLAN, spec_of

from attn_select.backends.spec import BackendSpec, Capabilities, Fact
from attn_select.testing.verdicts import check_verdicts

SITUATIONS = [{"pins": {"torch": "2.5.0"}, "layers": [{}, {"alibi": True}]}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file of ``spec_of()``."""
    with monkeypatch.context() as patch:
        patch.setenv("WRITE_VERDICTS", "1")
        check_verdicts(spec_of(), tmp_path / "golden", SITUATIONS)
    return tmp_path / "golden"


def test_the_file_says_what_the_gate_says(folder: Path) -> None:
    check_verdicts(spec_of(), folder, SITUATIONS)
    lines = (folder / "PLAIN.txt").read_text("utf-8").splitlines()
    assert lines[0] == "PLAIN: serves prefill and decode on cpu 8.0-9.0"
    assert "alibi True | all: alibi" in lines
    assert "    alibi | all: alibi" in lines
    (usual,) = (line.removeprefix("the usual | all: ") for line in lines if line.startswith("the usual |"))
    (plan,) = (line for line in lines if line.startswith(f"{usual} = "))
    assert "query_dtype=bfloat16, returns_lse=True, kv_layouts=FLASH_ATTN_NHD FLASHINFER_NHD" in plan


def with_fact(name: str, value: object) -> BackendSpec:
    spec = spec_of()
    served = spec.capabilities["decode"]
    assert isinstance(served, Capabilities)
    return replace(
        spec, capabilities={"prefill": served, "decode": replace(served, **{name: Fact(value, "this test")})}
    )


@pytest.mark.parametrize(
    "spec",
    [
        with_fact("alibi", True),
        with_fact("dtypes", ("bfloat16", "float16")),
        spec_of(replace(PLAN, returns_lse=False)),
        spec_of(replace(PLAN, kernel_block_sizes=(16, 1))),
    ],
    ids=["a feature", "a dtype", "the LSE", "block sizes"],
)
def test_a_changed_fact_is_found(folder: Path, spec: BackendSpec) -> None:
    with pytest.raises(AssertionError, match="WRITE_VERDICTS=1"):
        check_verdicts(spec, folder, SITUATIONS)


def test_words_may_change_and_a_file_may_not_be_missing(folder: Path, tmp_path: Path) -> None:
    check_verdicts(spec_of(replace(PLAN, because="of other words")), folder, SITUATIONS)
    with pytest.raises(AssertionError):
        check_verdicts(spec_of(), tmp_path / "elsewhere", SITUATIONS)
