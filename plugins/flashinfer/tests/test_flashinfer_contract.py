"""The functions, classes and parameters that the plans rest on exist in the FlashInfer that is installed."""

from __future__ import annotations

import importlib
import inspect
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

flashinfer: Any = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")


def parameters(name: str) -> set[str]:
    """Return the parameters of ``flashinfer.NAME`` (dotted); ``**kwargs`` is among them."""
    found = flashinfer
    for part in name.split("."):
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return set(inspect.signature(found).parameters)


PAGED_RUN = {"q", "paged_kv_cache", "out", "lse", "return_lse", "k_scale", "v_scale", "sinks"}

EXPECTED: dict[str, set[str]] = {
    "BatchPrefillWithPagedKVCacheWrapper.__init__": {
        "float_workspace_buffer",
        "kv_layout",
        "backend",
        "use_cuda_graph",
    },
    "BatchPrefillWithPagedKVCacheWrapper.plan": {
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim_qk",
        "page_size",
        "causal",
        "sm_scale",
        "window_left",
        "logits_soft_cap",
        "q_data_type",
        "kv_data_type",
        "o_data_type",
        "fixed_split_size",
        "disable_split_kv",
    },
    "BatchPrefillWithPagedKVCacheWrapper.run": {
        "q",
        "paged_kv_cache",
        "out",
        "lse",
        "return_lse",
        "k_scale",
        "v_scale",
    },
    "BatchDecodeWithPagedKVCacheWrapper.__init__": {"float_workspace_buffer", "use_tensor_cores", "backend"},
    "BatchDecodeWithPagedKVCacheWrapper.run": PAGED_RUN,
    "BatchPrefillWithRaggedKVCacheWrapper.plan": {
        "qo_indptr",
        "kv_indptr",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim_qk",
        "head_dim_vo",
        "causal",
        "sm_scale",
        "q_data_type",
    },
    "BatchPrefillWithRaggedKVCacheWrapper.run": {"q", "k", "v", "out", "return_lse"},
    "decode.trtllm_batch_decode_with_kv_cache": {
        "query",
        "kv_cache",
        "workspace_buffer",
        "block_tables",
        "seq_lens",
        "max_seq_len",
        "bmm1_scale",
        "bmm2_scale",
        "window_left",
        "out",
        "out_dtype",
        "o_sf_scale",
        "sinks",
        "kv_layout",
        "q_len_per_req",
        "mask",
        "backend",
        "lse",
        "return_lse",
    },
    "prefill.trtllm_batch_context_with_kv_cache": {
        "query",
        "kv_cache",
        "workspace_buffer",
        "block_tables",
        "seq_lens",
        "max_q_len",
        "max_kv_len",
        "bmm1_scale",
        "bmm2_scale",
        "batch_size",
        "cum_seq_lens_q",
        "cum_seq_lens_kv",
        "window_left",
        "out",
        "out_dtype",
        "kv_layout",
        "sinks",
    },
    "prefill.trtllm_ragged_attention_deepseek": {"query", "key", "value", "attention_sinks", "return_lse", "is_causal"},
    "mla.trtllm_batch_decode_with_kv_cache_mla": {
        "query",
        "kv_cache",
        "workspace_buffer",
        "qk_nope_head_dim",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "block_tables",
        "seq_lens",
        "max_seq_len",
        "sparse_mla_top_k",
        "bmm1_scale",
        "bmm2_scale",
        "sinks",
        "backend",
        "cum_seq_lens_q",
        "max_q_len",
        "lse",
        "return_lse",
        "kv_scale_format",
    },
    "mla.BatchMLAPagedAttentionWrapper.__init__": {"float_workspace_buffer", "use_cuda_graph", "backend"},
    "mla.BatchMLAPagedAttentionWrapper.plan": {
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "kv_len_arr",
        "num_heads",
        "head_dim_ckv",
        "head_dim_kpe",
        "page_size",
        "causal",
        "sm_scale",
        "q_data_type",
        "kv_data_type",
    },
    "mla.BatchMLAPagedAttentionWrapper.run": {"q_nope", "q_pe", "ckv_cache", "kpe_cache", "return_lse", "ckv_scale"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_parameters(name: str) -> None:
    missing = EXPECTED[name] - parameters(name)
    assert missing == set(), f"{name} of flashinfer {flashinfer.__version__} lacks {sorted(missing)}"


def test_decode_wrapper_takes_a_fixed_split() -> None:
    # 0.7 hands everything behind page_size on as keywords.
    found = parameters("BatchDecodeWithPagedKVCacheWrapper.plan")
    assert {"indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size"} <= found
    assert {"disable_split_kv", "fixed_split_size", "window_left", "logits_soft_cap"} <= found or "kwargs" in found


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


@pytest.mark.slow
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
