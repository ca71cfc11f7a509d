"""What ``attn-select flags`` prints is accepted by the engines' own argument parsers, where an engine is installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from attn_select_cli.main import run

MODELS = ("llama-3-8b", "gpt-oss-120b", "gemma-2-9b", "deepseek-v3", "bert-base")
GPUS = ("a100", "h100", "b200", "rtx5090")
OPTIONS = ((), ("--kv-cache-dtype", "fp8"), ("--batch-invariant", "-tp", "2"))


def printed(capfd: pytest.CaptureFixture[str], engine: str) -> Iterator[list[str]]:
    """Yield the arguments of every model on every GPU."""
    for model, gpu, options in product(MODELS, GPUS, OPTIONS):
        if model == "bert-base" and "--kv-cache-dtype" in options:
            continue  # it has no cache
        assert run(["flags", "-e", engine, "-m", model, "-g", gpu, *options, "--json"]) in (0, 1)
        yield json.loads(capfd.readouterr().out)["arguments"]


def value(arguments: list[str], flag: str) -> str | None:
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def test_vllm(capfd: pytest.CaptureFixture[str]) -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    parser = arg_utils.EngineArgs.add_cli_args(arg_utils.FlexibleArgumentParser())
    for arguments in printed(capfd, "vllm"):
        parsed = arg_utils.EngineArgs.from_cli_args(parser.parse_args(arguments))
        assert getattr(parsed.attention_backend, "name", parsed.attention_backend) == value(
            arguments, "--attention-backend"
        )
        prefill = parsed.attention_config.mla_prefill_backend
        assert (prefill and prefill.name) == value(arguments, "--attention-config.mla_prefill_backend")
        assert parsed.dtype == value(arguments, "--dtype")


@pytest.fixture
def sglang() -> Any:
    """SGLang's ``ServerArgs``. torchvision's compiled operators are declared where they are missing."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    torch = pytest.importorskip("torch")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    return importlib.import_module("sglang.srt.server_args").ServerArgs


def test_sglang(capfd: pytest.CaptureFixture[str], sglang: Any) -> None:
    parser = argparse.ArgumentParser()
    sglang.add_cli_args(parser)
    for arguments in printed(capfd, "sglang"):
        parsed = parser.parse_args(["--model-path", "model", *arguments])
        assert parsed.attention_backend == value(arguments, "--attention-backend")
        assert parsed.decode_attention_backend == value(arguments, "--decode-attention-backend")


def test_transformers(capfd: pytest.CaptureFixture[str]) -> None:
    cli = pytest.importorskip("transformers.cli.transformers", reason="transformers' command line is not installed")
    modeling_utils = pytest.importorskip("transformers.modeling_utils")
    for arguments in printed(capfd, "transformers"):
        context = cli.app.commands["serve"].make_context("serve", ["model", *arguments])
        assert context.params["attn_implementation"] == value(arguments, "--attn-implementation")
        name = context.params["attn_implementation"]
        assert name is None or "/" in name or name in modeling_utils.ALL_ATTENTION_FUNCTIONS
