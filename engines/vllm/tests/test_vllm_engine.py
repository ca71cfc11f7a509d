"""The real engine on a CPU: attn-select chooses, TORCH_SDPA runs under vLLM's protocol, and the tokens are vLLM's own.

Runs where vLLM is installed (``make test-engines``). Tokens are compared in float32, where both kernels agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

HERE = Path(__file__).parent
OWN = "ATTN_SELECT_TORCH_SDPA"
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SPAWNED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to ask the workers what they run
}
WITHOUT_US = {"VLLM_PLUGINS": ""}


def generate(model: Path, variables: dict[str, str], **options: Any) -> tuple[list[list[int]], list[set[str]], str]:
    """Run the engine in a process of its own; return the tokens, per worker the layers' backends, and the log."""
    fixed = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, str(HERE / "engine_run.py"), str(model), json.dumps({"enforce_eager": True} | options)]
    done = subprocess.run(
        command, env=os.environ | fixed | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == 1, done.stdout[-5000:]
    found = json.loads(results[0].removeprefix("RESULT "))
    return found["tokens"], [set(layers.values()) for layers in found["layers"]], done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    return {kind: tiny_models.save(kind, folder / kind) for kind in tiny_models.CONFIGS}


@pytest.fixture(scope="module")
def llama_by_vllm(models: dict[str, Path]) -> list[list[int]]:
    tokens, backends, log = generate(models["llama"], IN_ONE_PROCESS | WITHOUT_US)
    assert backends == [{"CPU_ATTN"}]
    assert "attn-select" not in log
    assert all(len(set(row)) > 10 for row in tokens)  # few different tokens would prove nothing
    return tokens


def test_tokens_of_a_compiled_llama(models: dict[str, Path], llama_by_vllm: list[list[int]]) -> None:
    tokens, backends, log = generate(models["llama"], IN_ONE_PROCESS, enforce_eager=False)
    assert (tokens, backends) == (llama_by_vllm, [{OWN}])
    assert "chose for full_attention: TORCH_SDPA (attn-select's kernel, as ATTN_SELECT_TORCH_SDPA)" in log
    assert "cpu (priority): only the kernels of torch run on a CPU" in log


def test_tokens_of_windows_beside_full_attention(models: dict[str, Path]) -> None:
    by_vllm, _, _ = generate(models["gemma3"], IN_ONE_PROCESS | WITHOUT_US)
    tokens, backends, log = generate(models["gemma3"], IN_ONE_PROCESS)
    assert (tokens, backends) == (by_vllm, [{OWN}])
    for kind in ("sliding_attention", "full_attention"):
        assert log.count(f"chose for {kind}: TORCH_SDPA") == 1


def test_spawned_workers_of_two_ranks(models: dict[str, Path], llama_by_vllm: list[list[int]]) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need a CPU each")
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    tokens, backends, log = generate(models["llama"], SPAWNED | bound, tensor_parallel_size=2)
    assert (tokens, backends) == (llama_by_vllm, [{OWN}, {OWN}])
    assert log.count("chose for full_attention: TORCH_SDPA") == 1
    assert "2 query heads, 1 KV head, head size 32" in log


def test_an_explicit_backend_wins(models: dict[str, Path], llama_by_vllm: list[list[int]]) -> None:
    tokens, backends, log = generate(models["llama"], IN_ONE_PROCESS, attention_backend="CPU_ATTN")
    assert (tokens, backends) == (llama_by_vllm, [{"CPU_ATTN"}])
    assert "leaves full_attention to CPU_ATTN: --attention-backend asks for it" in log
