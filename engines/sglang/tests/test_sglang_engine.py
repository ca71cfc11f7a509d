"""SGLang's real engine on a CPU: attn-select's kernels run behind its scheduler, and the tokens are SGLang's own.

Runs where SGLang is installed (``make test-engines``). Tokens are compared in float32, where both kernels agree.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_select.times.workload import parse_workload

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

OWN = {"attention_backend": "attn_select_torch_sdpa"}
SGLANGS = {"attention_backend": "torch_native"}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama by SGLang": ("llama", SGLANGS),
    "llama": ("llama", OWN),
    "llama in chunks, decodes among them": ("llama", OWN | {"chunked_prefill_size": 16, "enable_mixed_chunk": True}),
    "llama in pages of 16": ("llama", OWN | {"page_size": 16}),
    "gemma3 tied by SGLang": ("gemma3 tied", SGLANGS | {"disable_hybrid_swa_memory": True}),
    "gemma3 tied": ("gemma3 tied", OWN | {"disable_hybrid_swa_memory": True}),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[list[int]]], str, Path]:
    """The tokens of every engine, the log, and where observed workloads are."""
    import sglang_on_cpu

    sglang_on_cpu.define_operations()  # transformers imports torchvision too
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    models = {kind: str(tiny_models.save(kind, folder / kind)) for kind in tiny_models.CONFIGS}
    asked = json.dumps([(models[kind], options) for kind, options in ENGINES.values()])
    command = [sys.executable, str(Path(__file__).with_name("sglang_engine_run.py")), asked]
    variables = {"ATTN_SELECT_WORKLOAD": "observe", "XDG_CACHE_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(ENGINES), done.stdout[-5000:]
    return dict(zip(ENGINES, found, strict=True)), done.stdout, folder / "attn-select" / "workloads"


@pytest.mark.parametrize("name", [name for name in ENGINES if not name.endswith("by SGLang")])
def test_tokens_are_sglangs_own(ran: tuple[dict[str, list[list[int]]], str, Path], name: str) -> None:
    tokens = ran[0]
    wanted = tokens[f"{ENGINES[name][0]} by SGLang"]
    assert tokens[name] == wanted
    different = [len(set(row)) for row in wanted]
    assert sum(count > 10 for count in different) >= 0.7 * len(different), different  # few would prove nothing


def test_steps_are_observed_by_every_scheduler(ran: tuple[dict[str, list[list[int]]], str, Path]) -> None:
    files = sorted(ran[2].glob("sglang-*.toml"))
    assert len(files) == len(ENGINES)
    shapes = {str(shape.batch) for shape in parse_workload(files[0]).shapes}
    assert "q64_q40_q23_q5_q1" in shapes
    assert f"ATTN_SELECT_WORKLOAD={files[0]} chooses for it" in ran[1]
