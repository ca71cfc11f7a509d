"""What the golden files do not show: sources, what this machine lacks, what compiles together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec
from attn_select.decide.gate import check
from attn_select.machine.device import CPU, lookup
from attn_select.machine.environment import Environment
from attn_select.testing import check_sources, gqa_layer
from attn_select.testing.toolkit import codes
from attn_select_torch.facts.flex_attention import FLEX_ATTENTION, TRITON
from attn_select_torch.facts.torch_mla import TORCH_MLA
from attn_select_torch.facts.torch_mla_sparse import TORCH_MLA_SPARSE
from attn_select_torch.facts.torch_sdpa import TORCH_SDPA


@pytest.mark.parametrize("capability", [None, (9, 0)])
def test_flex_needs_a_compiler_here(
    capability: tuple[int, int] | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_select_torch.facts.flex_attention._cpu_has_template", lambda: True)
    device = replace(CPU if capability is None else lookup("h100"), local=True)
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    variable = "CXX" if capability is None else "CC"
    path = str(tmp_path)
    for variables, expected in (
        ({"PATH": path}, {"compiler-missing"}),
        ({"PATH": path, variable: "mycc -O2"}, set()),
        ({"PATH": path, variable: "othercc"}, {"compiler-missing"}),
    ):
        here = Environment(variables=variables)
        here._states.update(dict.fromkeys([TRITON, *FLEX_ATTENTION.libraries[0]], "installed"))
        outcome = check(FLEX_ATTENTION, gqa_layer(), device, here, FLEX_ATTENTION.options(), "decode")
        assert codes(outcome) == expected


def test_flex_needs_x86_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_select_torch.facts.flex_attention._cpu_has_template", lambda: False)
    monkeypatch.setattr("attn_select_torch.facts.flex_attention.compiler_reason", lambda *_: None)
    here = Environment()
    here._states.update(dict.fromkeys(FLEX_ATTENTION.libraries[0], "installed"))
    outcome = check(FLEX_ATTENTION, gqa_layer(), CPU, here, FLEX_ATTENTION.options(), "decode")
    assert codes(outcome) == {"cpu-architecture"}


def test_flex_compiles_once_per_shape_class() -> None:
    key = FLEX_ATTENTION.compile_key
    others: list[dict[str, Any]] = [{"head_size": 64}, {"num_heads": 16}, {"dtype": "float16"}, {"mm_prefix": True}]
    numbers: list[dict[str, Any]] = [{}, {"sliding_window": 8}, {"non_causal": True}, {"block_size": 64}]
    assert key(gqa_layer()) not in [key(gqa_layer(**asked)) for asked in others]
    assert {key(gqa_layer(**asked)) for asked in numbers} == {key(gqa_layer())}


@pytest.mark.parametrize("spec", [TORCH_SDPA, FLEX_ATTENTION, TORCH_MLA, TORCH_MLA_SPARSE], ids=lambda spec: spec.name)
def test_every_fact_has_a_source(spec: BackendSpec) -> None:
    check_sources(spec, least=20)
