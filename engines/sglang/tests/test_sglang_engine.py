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

OWN = {"attention_backend": "attn_select_torch_sdpa"}
SGLANGS = {"attention_backend": "torch_native"}
IN_CHUNKS = {"page_size": 16, "chunked_prefill_size": 16, "enable_mixed_chunk": True}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama by SGLang": ("llama", SGLANGS),
    "llama": ("llama", OWN),
    "llama in chunks and pages, decodes among them": ("llama", OWN | IN_CHUNKS),
    "gemma3 tied by SGLang": ("gemma3 tied", SGLANGS),
    "gemma3 tied": ("gemma3 tied", OWN),
}
MLA_IN_CHUNKS = IN_CHUNKS | {"attention_backend": "attn_select_torch_mla"}
BY_TRITON = IN_CHUNKS | {"attention_backend": "attn_select_triton_attn"}
FEW = {"max_new_tokens": 10}
"""For Triton's interpreter, which is slow."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[list[int]]], str, Path]:
    """The tokens of every engine, the log, and the folder of models and observed workloads."""
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    for kind in {kind for kind, _ in ENGINES.values()}:
        tiny_models.save(kind, folder / kind)
    engines = [(str(folder / kind), options) for kind, options in ENGINES.values()]
    found, log = run(engines, {"ATTN_SELECT_WORKLOAD": "observe", "XDG_CACHE_HOME": str(folder)})
    return dict(zip(ENGINES, found, strict=True)), log, folder


def run(engines: list[tuple[str, dict[str, Any]]], variables: dict[str, str]) -> tuple[list[Any], str]:
    """Run engines one after another in a process of their own; return their tokens, and the log."""
    command = [sys.executable, str(Path(__file__).with_name("sglang_engine_run.py")), json.dumps(engines)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    done = subprocess.run(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(engines), done.stdout[-5000:]
    return found, done.stdout


@pytest.mark.parametrize("name", [name for name in ENGINES if not name.endswith("by SGLang")])
def test_tokens_are_sglangs_own(ran: tuple[dict[str, list[list[int]]], str, Path], name: str) -> None:
    tokens = ran[0]
    wanted = tokens[f"{ENGINES[name][0]} by SGLang"]
    assert tokens[name] == wanted
    different = [len(set(row)) for row in wanted]
    assert sum(count > 10 for count in different) >= 0.7 * len(different), different  # few would prove nothing


def test_triton_attends_in_steps_of_decodes_and_chunks(ran: tuple[dict[str, list[list[int]]], str, Path]) -> None:
    """By Triton's interpreter, with windows, as planned for a GPU that is not here."""
    (found,), _ = run([(str(ran[2] / "gemma3 tied"), BY_TRITON | FEW)], {"TRITON_INTERPRET": "1"})
    assert found == beginnings(ran[0]["gemma3 tied by SGLang"])


def beginnings(rows: list[list[int]]) -> list[list[int]]:
    """What engines with ``FEW`` tokens should answer. The rounds are the same, since both take over 7 tokens."""
    return [row[: FEW["max_new_tokens"]] for row in rows]


def test_drafts_by_n_grams_change_no_token(ran: tuple[dict[str, list[list[int]]], str, Path]) -> None:
    """Trees of drafts, and chains on pages that Triton reads: SGLang's own kernels run by the interpreter too."""
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 5}
    trees = OWN | drafts | {"speculative_ngram_max_bfs_breadth": 3}
    chains = BY_TRITON | drafts | {"speculative_ngram_max_bfs_breadth": 1, "enable_mixed_chunk": False}
    llama = str(ran[2] / "llama")
    found, log = run([(llama, trees), (llama, chains)], {"TRITON_INTERPRET": "1"})
    assert found == [ran[0]["llama by SGLang"]] * 2
    for steps, tokens in re.findall(r"DRAFTS were checked in (\d+) steps for (\d+) tokens", log):
        assert int(steps) < 0.8 * int(tokens)
    assert log.count("DRAFTS were checked") == 2


def test_mla_in_chunks(tmp_path: Path) -> None:
    """Prompts are decompressed in chunks, which SGLang cuts with a kernel of Triton's: hence by the interpreter."""
    import tiny_models

    folder = str(tiny_models.save("deepseek", tmp_path / "deepseek"))
    wanted, found = run([(folder, options | FEW) for options in (SGLANGS, MLA_IN_CHUNKS)], {"TRITON_INTERPRET": "1"})[0]
    assert found == wanted
    assert min(len(set(row)) for row in wanted) > 5


def test_sinks(tmp_path: Path) -> None:
    """SGLang's ``torch_native`` knows no sinks, so the tokens are those of transformers."""
    import tiny_models
    import torch
    from transformers import AutoModelForCausalLM

    folder = str(tiny_models.save("granite with sinks", tmp_path / "granite"))
    (found,), log = run([(folder, IN_CHUNKS | OWN)], {})
    assert "SWAKVPool mem usage" in log  # layers with windows have a pool of their own, which drops what is behind
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


def test_steps_are_observed_by_every_scheduler(ran: tuple[dict[str, list[list[int]]], str, Path]) -> None:
    files = sorted((ran[2] / "attn-select" / "workloads").glob("sglang-*.toml"))
    assert len(files) == len(ENGINES)
    shapes = {str(shape.batch) for shape in parse_workload(files[0]).shapes}
    assert "q64_q40_q23_q5_q1" in shapes
    assert f"ATTN_SELECT_WORKLOAD={files[0]} chooses for it" in ran[1]
