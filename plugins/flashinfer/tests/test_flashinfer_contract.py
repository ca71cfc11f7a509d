"""What the plans rest on is true of the FlashInfer that is installed."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_select_flashinfer.runtime import library

flashinfer: Any = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")


def test_every_entry_takes_what_this_plugin_passes() -> None:
    library.flashinfer.cache_clear()
    assert library.flashinfer().version


def test_the_ends_that_the_facts_name() -> None:
    core = importlib.import_module("flashinfer.mla._core")
    assert core._TRTLLM_GEN_MLA_MAX_BATCH == 8192
    dims = {(each.kv_lora_rank, each.qk_rope_head_dim) for each in core.supported_mla_head_dimensions}
    assert {(512, 64), (256, 64)} <= dims


COMPILED = {
    "XQA, 16 bits": ("12.0f", "xqa", "gen_xqa_module(bf16, bf16, 16, 128, 8, True, bf16, 1)", "xqa_wrapper"),
    "XQA, FP8 and drafts": ("12.0f", "xqa", "gen_xqa_module(bf16, e4m3, 64, 128, 4, False, e4m3, 3)", "xqa_wrapper"),
    "XQA MLA": ("12.0f", "xqa", "gen_xqa_module_mla(e4m3, e4m3, 32, 576, 128)", "xqa_wrapper_mla"),
}
"""Kernels that are compiled for their parameters, as asked for on 12.x: architecture, module, call and function."""


@pytest.mark.slow(guard="test_every_entry_takes_what_this_plugin_passes")
@pytest.mark.parametrize("kernel", COMPILED)
def test_kernels_compile_for_other_devices(kernel: str, tmp_path: Path) -> None:
    """Every CUDA source of the module, without linking, which wants CUDA's libraries."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    architecture, module, call, function = COMPILED[kernel]
    script = (
        "import json, torch\n"
        "bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn\n"
        f"import flashinfer.jit.{module} as made\n"
        f"print(json.dumps(made.{call}.get_compile_commands()))"
    )
    environment = {**os.environ, "FLASHINFER_CUDA_ARCH_LIST": architecture, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    made = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    found = json.loads(made.stdout.splitlines()[-1])
    commands = [each["command"] for each in found if each["file"].endswith(".cu")]
    objects = []
    for command in commands:
        target = tmp_path / f"{len(objects)}.o"
        words = shlex.split(command)
        words[-1] = str(target)
        compiled = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if missing := re.search(r"fatal error: (cu\w+\.h): No such file", compiled.stderr):
            pytest.skip(f"the CUDA toolkit here has no {missing[1]}")
        assert compiled.returncode == 0, compiled.stderr[-3000:]
        objects.append(target.read_bytes())
    assert f"code=sm_{architecture.replace('.', '')}" in " ".join(commands)
    assert any(f"__tvm_ffi_{function}".encode() in each for each in objects)


def test_cutlass_prefill_has_the_sizes_of_mla() -> None:
    """Its module holds them all and chooses at run time."""
    source = Path(flashinfer.__file__).parent / "data" / "csrc" / "fmha_cutlass_sm100.cu"
    if not source.exists():
        pytest.skip(f"{source.parent} has no sources")
    assert "head_dim_qk == 192 && head_dim_vo == 128" in source.read_text(encoding="utf-8")
