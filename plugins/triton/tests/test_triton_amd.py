"""The kernels compile ahead for AMD's GPUs, into their LDS: what core's ``amd.toml`` rests on. None ever ran there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_triton_aot import ATTENTION, run

from attn_select.decide.amd import rows

pytest.importorskip("triton.backends.amd", reason="needs Triton's back end for AMD, which its wheel brings")

LDS = {"gfx942": 64, "gfx950": 160}
"""KiB of LDS of a workgroup (AMD's CDNA 3 and CDNA 4 instruction set architecture guides)."""


@pytest.mark.slow(guard="test_a_usual_layer_compiles; the gate's rows in tests/core/test_amd.py")
@pytest.mark.parametrize("arch", LDS)
def test_what_the_gate_accepts_compiles_into_the_lds(arch: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in run("compile_for_amd", arch, tmp_path).splitlines()]
    assert {*ATTENTION} <= {line["kernel"] for line in lines}
    for line in lines:
        assert line["shared"] <= LDS[arch] << 10, line


def test_the_rows_name_the_architectures_that_are_compiled_for() -> None:
    archs = {
        arch for when, _ in rows()["TRITON_ATTN"] for each in when if each.field == "arch" for arch in each.written
    }
    assert archs == {*LDS}
