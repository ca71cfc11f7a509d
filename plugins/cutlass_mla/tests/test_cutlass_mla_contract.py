"""The functions and parameters that the providers' facts rest on exist in what is installed.

Read from the sources: importing vLLM or sgl-kernel needs a CUDA device's libraries.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest


def parameters(module: str, file: str, function: str) -> list[str]:
    """Return the parameters of ``function`` in ``file`` of an installed package; skip where it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        pytest.skip(f"{module} is not installed")
    source = Path(spec.origin).parent / file
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [argument.arg for argument in node.args.args]
    pytest.fail(f"{source} has no {function}")


def test_vllm() -> None:
    found = parameters("vllm", "_custom_ops.py", "sm100_cutlass_mla_decode")
    assert found[:5] == ["out", "lse", "q_nope", "q_pe", "kv_c_and_k_pe_cache"]
    assert found[5:] == ["seq_lens", "page_table", "workspace", "scale", "num_kv_splits"]


def test_sgl_kernel() -> None:
    found = parameters("sgl_kernel", "attention.py", "cutlass_mla_decode")
    assert found[:6] == ["q_nope", "q_pe", "kv_c_and_k_pe_cache", "seq_lens", "page_table", "workspace"]
    assert found[6:] == ["sm_scale", "num_kv_splits"]
    assert "lse" not in found


def test_flashinfer() -> None:
    assert parameters("flashinfer", "mla/_core.py", "get_mla_module") == []
    run = parameters("flashinfer", "jit/mla.py", "gen_mla_module")
    assert run == []
