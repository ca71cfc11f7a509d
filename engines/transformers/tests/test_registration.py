"""What importing the package does, and what it leaves undone in a release that it was not run with."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from types import ModuleType

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import attn_select_transformers  # noqa: E402

pytestmark = pytest.mark.long

GENERATE = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
{before}
import torch, transformers
sys.path[:0] = {path!r}
import models_for_tests as models
from attn_select.runtime import Attention
import attn_select_transformers
calls = []
original = Attention.forward
Attention.forward = lambda *arguments, **options: (calls.append(1), original(*arguments, **options))[1]
ids = torch.arange(1, 12)[None]
for make in (models.gpt_oss,):  # windows and sinks
    found = []
    for name in ({reference!r}, "attn_select"):
        model = models.built(make)
        if name is not None:
            model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4))
    assert torch.equal(*found), make
{after}
print("takes part:", attn_select_transformers.register(), "kernels:", len(calls))
"""
BATCHING = """
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache
cache.PagedAttentionMemoryHandler.get_available_memory = lambda *_: 1 << 30
known = ContinuousBatchingConfig.__dataclass_fields__
sizes = {"page_size": 16, "block_size": 16, "num_blocks": 32, "max_batch_tokens": 64, "use_async_batching": False}
batching = ContinuousBatchingConfig(**{name: value for name, value in sizes.items() if name in known})
generation = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
model = models.built(models.llama)
tokens = []
for name in ("sdpa", "attn_select"):
    model.set_attn_implementation(name)
    found = model.generate_batch(
        inputs=[[1, 2, 3], list(range(1, 30))], generation_config=generation, continuous_batching_config=batching,
        progress_bar=False,
    )
    tokens.append(sorted(tuple(one.generated_tokens) for one in found.values()))
assert tokens[0] == tokens[1] and len(tokens[0]) == 2, tokens
"""
OTHER_RELEASE = "import transformers; transformers.__version__ = '5.99.1'"
MOVED = """
from transformers.generation.continuous_batching import initialization
del initialization.ensure_decode_fast_path_is_available
"""


def output(before: str, reference: str | None = None, after: str = "", **variables: str) -> str:
    """Run ``GENERATE``: ``reference`` and attn_select must give the same tokens. None is what transformers chooses."""
    code = GENERATE.format(before=before, reference=reference, after=after, path=[os.path.dirname(__file__)])
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr
    return done.stdout


def test_importing_registers_and_a_second_time_changes_nothing() -> None:
    known = transformers.AttentionInterface._global_mapping["attn_select"]
    assert attn_select_transformers.register()
    assert transformers.AttentionInterface._global_mapping["attn_select"] is known
    assert "attn_select" in transformers.AttentionMaskInterface._global_mapping


def test_the_command_line_of_transformers_knows_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[bool] = []
    command_line = ModuleType("transformers.cli.transformers")
    command_line.main = lambda: known.append("attn_select" in transformers.AttentionInterface())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, command_line.__name__, command_line)
    runpy.run_module("attn_select_transformers", run_name="__main__")
    assert known == [True]


@pytest.mark.parametrize(
    ("before", "said"),
    [(OTHER_RELEASE, "takes no part in transformers 5.99.1"), (MOVED, "an interface has moved (")],
    ids=["release", "interface"],
)
def test_transformers_own_attention_runs_where_the_adapter_takes_no_part(before: str, said: str) -> None:
    found = output(before, after=BATCHING if before == OTHER_RELEASE else "", ATTN_SELECT_ANY_VERSION="")
    assert found.count(said) == 1
    assert "takes part: False kernels: 0" in found
    if before == OTHER_RELEASE:
        assert "ATTN_SELECT_ANY_VERSION=1" in found


def test_any_release_on_request() -> None:
    found = output(OTHER_RELEASE, "eager", ATTN_SELECT_ANY_VERSION="1")
    assert "takes no part" not in found
    assert "takes part: True kernels: " in found
    assert "kernels: 0" not in found
