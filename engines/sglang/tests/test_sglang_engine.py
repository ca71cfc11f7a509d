"""SGLang's real engine on a CPU: attn-select's kernels run behind its scheduler, and the tokens are SGLang's own.

Runs where SGLang is installed (``make test-engines``). Tokens are compared in float32, where both kernels agree.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sglang_on_cpu

from attn_select.times.workload import parse_workload

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

sglang_on_cpu.define_operations()  # transformers imports torchvision too

by_the_interpreter = pytest.mark.slow(
    guard="test_tokens_are_sglangs_own, of real engines; test_sglang_kernels and test_sglang_mla, of the same kernels"
)
OWN = {"attention_backend": "attn_select_torch_sdpa"}
SGLANGS = {"attention_backend": "torch_native"}
IN_CHUNKS = {"page_size": 16, "chunked_prefill_size": 16, "enable_mixed_chunk": True}
BY_TRITON = IN_CHUNKS | {"attention_backend": "attn_select_triton_attn"}
BY_TORCH_MLA = IN_CHUNKS | {"attention_backend": "attn_select_torch_mla"}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}
FEW = {"max_new_tokens": 10}
"""For Triton's interpreter, which is slow."""
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama by SGLang": ("llama", SGLANGS),
    "llama": ("llama", OWN),
    "llama in chunks and pages, decodes among them": ("llama", OWN | IN_CHUNKS),
    "gemma3 tied by SGLang": ("gemma3 tied", SGLANGS),
    "gemma3 tied": ("gemma3 tied", OWN),
    "granite": ("granite with sinks", OWN | IN_CHUNKS),
}
INTERPRETED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3 tied", BY_TRITON | FEW),
    "trees": ("llama", OWN | DRAFTS | {"speculative_ngram_max_bfs_breadth": 3}),
    "chains": ("llama", BY_TRITON | DRAFTS | {"speculative_ngram_max_bfs_breadth": 1, "enable_mixed_chunk": False}),
    "deepseek by SGLang": ("deepseek", SGLANGS | FEW),
    "deepseek": ("deepseek", BY_TORCH_MLA | FEW),
}
"""Engines in which kernels of Triton's run, SGLang's own too."""
Ran = tuple[dict[str, list[list[int]]], str]
"""The tokens by engine, and the log."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models, and of observed workloads."""
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    for kind in {kind for kind, _ in (*ENGINES.values(), *INTERPRETED.values())}:
        tiny_models.save(kind, folder / kind)
    return folder


@pytest.fixture(scope="module")
def ran(models: Path) -> Ran:
    return run(ENGINES, models, {"ATTN_SELECT_WORKLOAD": "observe", "XDG_CACHE_HOME": str(models)})


@pytest.fixture(scope="module")
def interpreted(models: Path) -> Ran:
    return run(INTERPRETED, models, {"TRITON_INTERPRET": "1"})


def run(engines: dict[str, tuple[str, dict[str, Any]]], models: Path, variables: dict[str, str]) -> Ran:
    """Run engines one after another in a process of their own."""
    asked = json.dumps([(str(models / kind), options) for kind, options in engines.values()])
    command = [sys.executable, str(Path(__file__).with_name("sglang_engine_run.py")), asked]
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(engines), done.stdout[-5000:]
    return dict(zip(engines, found, strict=True)), done.stdout


@pytest.mark.parametrize("name", ["llama", "llama in chunks and pages, decodes among them", "gemma3 tied"])
def test_tokens_are_sglangs_own(ran: Ran, name: str) -> None:
    tokens = ran[0]
    wanted = tokens[f"{ENGINES[name][0]} by SGLang"]
    assert tokens[name] == wanted
    different = [len(set(row)) for row in wanted]
    assert sum(count > 10 for count in different) >= 0.7 * len(different), different  # few would prove nothing


@by_the_interpreter
def test_triton_attends_in_steps_of_decodes_and_chunks(ran: Ran, interpreted: Ran) -> None:
    """With windows, as planned for a GPU that is not here. Its second prompts are the same: they take over 7 tokens."""
    wanted = ran[0]["gemma3 tied by SGLang"]
    assert interpreted[0]["gemma3"] == [row[: FEW["max_new_tokens"]] for row in wanted]


@by_the_interpreter
def test_drafts_by_n_grams_change_no_token(ran: Ran, interpreted: Ran) -> None:
    """Trees of drafts, and chains on pages that Triton reads: SGLang's own kernels run by the interpreter too."""
    found, log = interpreted
    assert found["trees"] == found["chains"] == ran[0]["llama by SGLang"]
    checked = re.findall(r"DRAFTS were checked in (\d+) steps for (\d+) tokens", log)
    assert len(checked) == 2
    for steps, tokens in checked:
        assert int(steps) < 0.8 * int(tokens)


@by_the_interpreter
def test_mla_in_chunks(interpreted: Ran) -> None:
    """Prompts are decompressed in chunks, which SGLang cuts with a kernel of Triton's: hence by the interpreter."""
    found, wanted = interpreted[0]["deepseek"], interpreted[0]["deepseek by SGLang"]
    assert found == wanted
    assert min(len(set(row)) for row in wanted) > 5


def test_sinks(ran: Ran, models: Path) -> None:
    """SGLang's ``torch_native`` knows no sinks, so the tokens are those of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    found = ran[0]["granite"]
    log = ran[1].split("RESULT ")[list(ENGINES).index("granite")]  # from the engine before it to its own end
    assert "SWAKVPool mem usage" in log  # layers with windows have a pool of their own, which drops what is behind
    folder = models / "granite with sinks"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompts = sglang_on_cpu.PROMPTS
    prompts = prompts + [prompt + row[:7] for prompt, row in zip(prompts, found, strict=False)]
    for prompt, row in zip(prompts, found, strict=True):
        tokens = list(prompt)
        with torch.no_grad():
            while len(tokens) < len(prompt) + len(row):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert row == tokens[len(prompt) :]
    assert min(len(set(row)) for row in found) > 10


def test_steps_are_observed_by_every_scheduler(ran: Ran, models: Path) -> None:
    files = sorted((models / "attn-select" / "workloads").glob("sglang-*.toml"))
    assert len(files) == len(ENGINES)
    shapes = {str(shape.batch) for shape in parse_workload(files[0]).shapes}
    assert "q64_q40_q23_q5_q1" in shapes
    assert f"ATTN_SELECT_WORKLOAD={files[0]} chooses for it" in ran[1]
