"""The real engine on a CPU: a rule asks for TORCH_SDPA, it runs under vLLM's protocol, and the tokens are vLLM's own.

Runs where vLLM is installed (``make test-engines``). Tokens are compared in float32, where both kernels agree.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from attn_select.times.batch_shape import parse_batch_shape
from attn_select.times.workload import parse_workload

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

HERE = Path(__file__).parent
OWN = "ATTN_SELECT_TORCH_SDPA"
ENCODERS = ("bert", "modernbert")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
more_engines = pytest.mark.slow(
    guard="test_tokens_are_vllms_own, of real engines; test_vllm_kernels and test_vllm_drawn_steps, by an emulated vLLM"
)
CHOSEN = "chose for {}: TORCH_SDPA (attn-select's kernel, as ATTN_SELECT_TORCH_SDPA)"


@dataclass(frozen=True)
class Run:
    """What one engine did.

    Attributes:
        tokens: generated, by prompt.
        vectors: of the prompts, where a model embeds them.
        backends: names of the layers' backends, by worker.
        drafts: how many tokens were drafted, and how many of them accepted.
        bounded_steps: how many steps had lengths that the host did not know, until then and in its process.
    """

    tokens: list[list[int]]
    vectors: list[list[float]]
    backends: list[set[str]]
    drafts: list[int]
    bounded_steps: int


def run(
    variables: dict[str, str], *engines: tuple[Path, dict[str, Any]], gpu: str | None = None
) -> tuple[list[Run], str]:
    """Run engines one after another in a process of their own; return what they did, and the log.

    A rule asks for attn-select's kernels, since vLLM's own choice stays otherwise. With ``gpu`` they run by Triton's
    interpreter, as planned for it.
    """
    fixed = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    fixed["ATTN_SELECT_RULES"] = str(HERE / "our_kernels.toml")
    asked = json.dumps([(str(folder), {"enforce_eager": True} | options) for folder, options in engines])
    command = [sys.executable, str(HERE / "engine_run.py"), asked, *([gpu] if gpu else [])]
    done = subprocess.run(
        command, env=os.environ | fixed | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(engines), done.stdout[-5000:]
    return [_run_of(**one) for one in found], done.stdout


def _run_of(
    layers: list[dict[str, str]],
    tokens: Sequence[list[int]] = (),
    vectors: Sequence[list[float]] = (),
    drafts: Sequence[int] = (),
    bounded_steps: int = 0,
) -> Run:
    return Run([*tokens], [*vectors], [set(worker.values()) for worker in layers], [*drafts], bounded_steps)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    found = {kind: tiny_models.save(kind, folder / kind) for kind in tiny_models.CONFIGS}
    found["eagle"] = tiny_models.save_eagle(found["llama of one layer"], folder / "eagle")
    found["pard"] = tiny_models.save_again(found["llama"], folder / "pard", pard_token=7)
    found["whisper"] = tiny_models.save_whisper(folder / "whisper")
    found["mimo"] = tiny_models.save_mtp(found["qwen2"], folder / "mimo")
    return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the steps of the engines in one process are observed."""
    return tmp_path_factory.mktemp("cache")


def connected(folder: Path) -> dict[str, Any]:
    """The options of an engine that stores the cache of its prompts in a folder, and loads what is there."""
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    # This connector knows prompts by their whole blocks, and takes all that have none for one.
    return {"kv_transfer_config": connector | extra, "block_size": 32, "shortest": 32}


@pytest.fixture(scope="module")
def in_one_process(models: dict[str, Path], watched: Path) -> tuple[dict[str, Run], str]:
    """Each model on vLLM's backend, which is asked for by name, and as attn-select chooses; a Llama compiled."""
    by_name = {"attention_backend": "CPU_ATTN"}
    engines = {
        "llama by vLLM": (models["llama"], by_name),
        "llama": (models["llama"], {"enforce_eager": False}),
        "gemma3 by vLLM": (models["gemma3"], by_name),
        "gemma3": (models["gemma3"], {}),
        # Last: vLLM 0.32 starts no engine in a process that has loaded numba's library for n-grams.
        "llama with drafts": (models["llama"], {"speculative_config": DRAFTS}),
    }
    observing = {"ATTN_SELECT_WORKLOAD": "observe", "XDG_CACHE_HOME": str(watched)}
    runs, log = run({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | observing, *engines.values())
    return dict(zip(engines, runs, strict=True)), log


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_tokens_are_vllms_own(in_one_process: tuple[dict[str, Run], str], kind: str) -> None:
    runs, _ = in_one_process
    wanted, found = runs[f"{kind} by vLLM"], runs[kind]
    assert (wanted.backends, found.backends) == ([{"CPU_ATTN"}], [{OWN}])
    assert found.tokens == wanted.tokens
    assert all(len(set(row)) > 10 for row in wanted.tokens)  # few different tokens would prove nothing


def test_drafts_by_n_grams_run_our_kernel_and_change_no_token(in_one_process: tuple[dict[str, Run], str]) -> None:
    runs, _ = in_one_process
    assert runs["llama with drafts"].backends == [{OWN}]
    assert runs["llama with drafts"].tokens == runs["llama by vLLM"].tokens


def drafting(**options: Any) -> dict[str, Any]:
    return {"speculative_config": {"num_speculative_tokens": 2, **options}}


def by_vllm(options: dict[str, Any]) -> dict[str, Any]:
    """The same engine with vLLM's kernel in the model and in what drafts."""
    own = {"attention_backend": "CPU_ATTN"}
    return {**own, "speculative_config": options["speculative_config"] | own}


@pytest.fixture(scope="module")
def of_other_kinds(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Run], dict[str, str]]:
    """On vLLM's kernel and on ours: encoders, models with layers that draft, a Whisper; and the log, by engine."""
    stored = tmp_path_factory.mktemp("stored")
    eagle = drafting(method="eagle", model=str(models["eagle"]))
    mtp = drafting(method="mtp", num_speculative_tokens=1)
    at_once = drafting(method="draft_model", model=str(models["pard"]), parallel_drafting=True)
    by_name = {"attention_backend": "CPU_ATTN"}
    hearing = {"sounds": True, "max_model_len": 128, "max_num_batched_tokens": 2048}
    engines: dict[str, tuple[Path, dict[str, Any]]] = {}
    for name in ENCODERS:
        engines[f"{name} by vLLM"] = models[name], {"runner": "pooling"} | by_name
        engines[name] = models[name], {"runner": "pooling"}
    engines |= {
        "eagle by vLLM": (models["llama of one layer"], by_vllm(eagle)),
        "eagle": (models["llama of one layer"], eagle),
        "mtp by vLLM": (models["mimo"], by_vllm(mtp)),
        "mtp": (models["mimo"], mtp),
        "itself": (models["llama"], drafting(method="draft_model", model=str(models["llama"]))),
        "at once by vLLM": (models["llama"], by_vllm(at_once)),
        "at once": (models["llama"], at_once),
        "whisper by vLLM": (models["whisper"], hearing | by_name),
        "whisper": (models["whisper"], hearing),
        "stored": (models["llama"], connected(stored) | by_name),
        "loaded": (models["llama"], connected(stored)),
    }
    runs, log = run({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, *engines.values())
    *logs, _ = log.split("RESULT ")
    return dict(zip(engines, runs, strict=True)), dict(zip(engines, logs, strict=True))


@more_engines
@pytest.mark.parametrize("method", ["eagle", "mtp", "at once"])
def test_drafts_by_layers_of_their_own_are_vllms(
    of_other_kinds: tuple[dict[str, Run], dict[str, str]], method: str
) -> None:
    wanted, found = of_other_kinds[0][f"{method} by vLLM"], of_other_kinds[0][method]
    assert (wanted.backends, found.backends) == ([{"CPU_ATTN"}], [{OWN}])
    assert (found.tokens, found.drafts) == (wanted.tokens, wanted.drafts)
    assert found.drafts[0] > 100
    if method != "mtp":  # right at times, and wrong at others
        assert 0 < found.drafts[1] < found.drafts[0]


@more_engines
def test_a_model_that_drafts_for_itself_is_always_right(
    of_other_kinds: tuple[dict[str, Run], dict[str, str]], in_one_process: tuple[dict[str, Run], str]
) -> None:
    found = of_other_kinds[0]["itself"]
    assert found.backends == [{OWN}]
    assert found.tokens == in_one_process[0]["llama by vLLM"].tokens
    assert found.drafts[0] == found.drafts[1] > 50


FEW = {"tokens": 8}
"""For what runs in several processes or one by one."""
TRITON = {"attention_backend": "ATTN_SELECT_TRITON_ATTN"}
PAIRED = {"attention_backend": "ATTN_SELECT_FLASH_ATTN_TRITON_ATTN"}
# Prompts come one by one: several at once are wrong by vLLM's own prefills of MLA, under this runner on a CPU.
LATENTS = FEW | {"attention_backend": "ATTN_SELECT_TRITON_MLA", "dtype": "float16", "one_by_one": True}


@pytest.fixture(scope="module")
def under_the_runner_of_gpus(models: dict[str, Path]) -> tuple[dict[str, Run], str]:
    """attn-select's kernels by Triton's interpreter, under vLLM's model runner V2; and the log."""
    eagle = drafting(method="eagle", model=str(models["eagle"]), **TRITON)
    engines = {
        "pair": (models["llama"], PAIRED),
        "eagle": (models["llama of one layer"], eagle | TRITON),
        "one KV head": (models["llama of one KV head"], TRITON | FEW),
        "deepseek": (models["deepseek"], LATENTS),
        "deepseek with drafts": (models["deepseek"], LATENTS | {"speculative_config": DRAFTS}),
    }
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    runs, log = run(variables, *engines.values(), gpu="a100")
    return dict(zip(engines, runs, strict=True)), log


@more_engines
def test_triton_runs_under_the_runner_of_gpus(
    under_the_runner_of_gpus: tuple[dict[str, Run], str],
    of_other_kinds: tuple[dict[str, Run], dict[str, str]],
    in_one_process: tuple[dict[str, Run], str],
) -> None:
    """``TRITON_ATTN`` with drafts, whose lengths the host does not know, and a pair: prefills by another backend."""
    runs, log = under_the_runner_of_gpus
    paired, guessing, wanted = runs["pair"], runs["eagle"], of_other_kinds[0]["eagle by vLLM"]
    assert "V2 Model Runner" in log
    assert (paired.backends, guessing.backends) == ([set(PAIRED.values())], [set(TRITON.values())])
    assert paired.tokens == in_one_process[0]["llama by vLLM"].tokens
    assert (guessing.tokens, guessing.drafts) == (wanted.tokens, wanted.drafts)
    assert paired.bounded_steps == 0 < guessing.bounded_steps


TWO_RANKS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to ask the workers what they run
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # the other one's kernel for CPUs refuses shared contexts
    "TORCHDYNAMO_DISABLE": "1",
}
"""The variables of engines whose two ranks share contexts."""
SHARED = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16}
"""Runs of 16 tokens lie on one rank, so that the other has none of a short context."""
two_cpus = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need a CPU each")


@more_engines
@two_cpus
def test_ranks_share_contexts(models: dict[str, Path], under_the_runner_of_gpus: tuple[dict[str, Run], str]) -> None:
    """vLLM wants more ranks than KV heads for it. Steps are mixed."""
    whole = under_the_runner_of_gpus[0]["one KV head"]
    options = TRITON | FEW | SHARED | {"tensor_parallel_size": 2}
    (found,), log = run(TWO_RANKS, (models["llama of one KV head"], options), gpu="a100")
    assert found.backends == [{"ATTN_SELECT_TRITON_ATTN"}] * 2
    assert "Worker_TP1_DCP1" in log
    assert found.tokens == whole.tokens
    assert all(len(set(row)) > 5 for row in whole.tokens)  # few different tokens would prove nothing


def assert_near(found: Run, wanted: Run) -> None:
    """Check that most tokens come before the first difference of a prompt: some may differ in float16."""
    pairs = zip(wanted.tokens, found.tokens, strict=True)
    same = [list(takewhile(lambda each: each[0] == each[1], zip(*rows, strict=True))) for rows in pairs]
    assert sum(map(len, same)) > 0.8 * sum(map(len, wanted.tokens))
    assert all(len(set(row)) > 5 for row in wanted.tokens)  # few different tokens would prove nothing


@more_engines
def test_mla_verifies_drafts(under_the_runner_of_gpus: tuple[dict[str, Run], str]) -> None:
    plain, found = (under_the_runner_of_gpus[0][name] for name in ("deepseek", "deepseek with drafts"))
    assert found.backends == plain.backends == [{"ATTN_SELECT_TRITON_MLA"}]
    assert found.drafts[0] > 10
    assert_near(found, plain)


@more_engines
@two_cpus
def test_ranks_share_the_contexts_of_mla(
    models: dict[str, Path], under_the_runner_of_gpus: tuple[dict[str, Run], str]
) -> None:
    """In float16, in which the kernel runs; beside one rank with whole contexts."""
    whole = under_the_runner_of_gpus[0]["deepseek"]
    options = LATENTS | SHARED | {"tensor_parallel_size": 2}
    (found,), log = run(TWO_RANKS, (models["deepseek"], options), gpu="a100")
    assert whole.backends == [{"ATTN_SELECT_TRITON_MLA"}]
    assert found.backends == whole.backends * 2
    assert "Worker_TP1_DCP1" in log
    assert_near(found, whole)


@more_engines
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_give_vllms_vectors(of_other_kinds: tuple[dict[str, Run], dict[str, str]], name: str) -> None:
    """A ModernBERT has windows to both sides, which are shorter than its longest prompts."""
    runs, logs = of_other_kinds
    wanted, found = runs[f"{name} by vLLM"], runs[name]
    assert (wanted.backends, found.backends) == ([{"CPU_ATTN"}], [{OWN}])
    assert len(found.vectors) == 5
    for row, expected in zip(found.vectors, wanted.vectors, strict=True):
        assert row == pytest.approx(expected, abs=2e-6)
    assert CHOSEN.format("encoder_only") in logs[ENCODERS[0]]  # said once in a process


@more_engines
def test_a_whisper_hears_as_with_vllms_kernel(of_other_kinds: tuple[dict[str, Run], dict[str, str]]) -> None:
    """Its decoder's layers attend to the cache of what its encoder made of a sound."""
    runs, logs = of_other_kinds
    wanted, found = runs["whisper by vLLM"], runs["whisper"]
    assert (wanted.backends, found.backends) == ([{"CPU_ATTN"}], [{OWN}])
    assert found.tokens == wanted.tokens
    assert sum(len(set(row)) > 8 for row in wanted.tokens) > 2  # few different tokens would prove nothing
    assert CHOSEN.format("cross_attention") in logs["whisper"]


@more_engines
def test_a_store_written_by_vllms_backend_is_read_by_it(
    of_other_kinds: tuple[dict[str, Run], dict[str, str]], in_one_process: tuple[dict[str, Run], str]
) -> None:
    """CPU_ATTN packs keys by the CPU's instructions, and the connector's store does not say so: no other reads them."""
    runs, logs = of_other_kinds
    wanted = in_one_process[0]["llama by vLLM"].tokens
    long = [row for row, length in zip(wanted, (5, 40, 1, 23, 64), strict=True) if length > 32]
    for name in ("stored", "loaded"):
        assert runs[name].tokens == long
        assert runs[name].backends == [{"CPU_ATTN"}]
    assert logs["loaded"].count("External Cache Hit!") == len(long)


@more_engines
def test_a_connector_takes_latents_from_one_engine_to_another(models: dict[str, Path], tmp_path: Path) -> None:
    """The first engine computes its prompts, and the second finds them."""
    own = {"attention_backend": "ATTN_SELECT_TRITON_MLA", "dtype": "float16"} | FEW | connected(tmp_path)
    (stored, loaded), log = run({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, *[(models["deepseek"], own)] * 2, gpu="a100")
    assert stored.backends == loaded.backends == [{"ATTN_SELECT_TRITON_MLA"}]
    assert loaded.tokens == stored.tokens
    assert log.count("External Cache Hit!") == len(stored.tokens) == 2


def test_every_kind_of_layers_is_logged_once(in_one_process: tuple[dict[str, Run], str]) -> None:
    log = in_one_process[1]
    assert "leaves full_attention to CPU_ATTN: --attention-backend, attention_config or the model asks for it" in log
    assert log.count(CHOSEN.format("sliding_attention")) == 1
    assert CHOSEN.format("full_attention") in log
    assert "cpu (priority): only the kernels of torch run on a CPU" in log


def test_spawned_workers_of_two_ranks(
    models: dict[str, Path], in_one_process: tuple[dict[str, Run], str], tmp_path: Path
) -> None:
    """Observed: the steps are counted once, where they are scheduled."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need a CPU each")
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to ask the workers what they run
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "ATTN_SELECT_WORKLOAD": "observe",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    (found,), log = run(variables, (models["llama"], {"tensor_parallel_size": 2}))
    assert (found.tokens, found.backends) == (in_one_process[0]["llama by vLLM"].tokens, [{OWN}, {OWN}])
    assert log.count(CHOSEN.format("full_attention")) == 1
    assert "2 query heads, 1 KV head, head size 32" in log
    (file,) = observed(tmp_path)
    assert max(shape.batch.num_requests for shape in parse_workload(file).shapes) == 5


def observed(folder: Path) -> list[Path]:
    return [*(folder / "attn-select" / "workloads").glob("vllm-*.toml")]


def test_observed_steps_are_those_that_ran(in_one_process: tuple[dict[str, Run], str], watched: Path) -> None:
    """Whatever backends ran them: all engines' steps are in the file of their process."""
    runs, log = in_one_process
    (file,) = observed(watched)
    shapes = {str(shape.batch): shape.weight for shape in parse_workload(file).shapes}
    steps = sum(map(int, re.findall(r"(\d+) (?:decode|prefill|mixed)", file.read_text().partition("\n")[0])))
    # Each engine runs its prompts of 5, 40, 1, 23 and 64 tokens in one step, and then decodes all five.
    assert shapes["q64_q40_q23_q5_q1"] == pytest.approx(len(runs) / steps, rel=1e-4)
    decodes = [batch for batch in map(parse_batch_shape, shapes) if batch.max_query_len == 1]  # others are of drafts
    assert {(each.num_requests, each.num_tokens) for each in decodes} == {(5, 5)}
    assert min(each.num_kv_tokens for each in decodes) == 5 + 40 + 1 + 23 + 64 + 5
    assert f"ATTN_SELECT_WORKLOAD={file} chooses for it" in log
