"""What attn-select chooses for SGLang, without SGLang: names, pairs, and agreement with ``attn-select flags``."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from attn_select import AttentionConfig, configs_from_model, select, select_model
from attn_select.engines.names import engine_table
from attn_select.layer.models import load
from attn_select.machine.device import lookup
from attn_select.testing.toolkit import GQA_FIELDS, MLA_FIELDS
from attn_select_cli.engine_arguments import engine_arguments
from attn_select_cli.explanation import build_explanation
from attn_select_cli.layer_options import options_in
from attn_select_sglang.choice import Choice, choose
from attn_select_sglang.names import TABLE, lacks

GPUS = ("a100", "a10", "l40s", "h100", "h20", "h200", "b200", "b300", "rtx5090", "rtx-pro-6000")
MODELS = ("llama-3-8b", "gpt-oss-120b", "gemma-2-9b", "gemma-3-27b", "gemma-4", "llama-4-scout", "deepseek-v3")


def chosen(model: str, gpu: str, has_flashinfer: bool = True) -> Choice:
    kinds = configs_from_model(model, device=lookup(gpu))
    return choose(select_model(kinds.configs, gpu), has_flashinfer, load(model).architecture)


@pytest.mark.parametrize(("model", "gpu"), [*product(MODELS, GPUS)])
def test_flags_says_the_same(model: str, gpu: str) -> None:
    explanation = build_explanation(options_in(f"--model {model} --gpu {gpu}", "test")[0])
    said = engine_arguments(explanation, engine_table("sglang"), 1, {})
    default = {each.default.name for each in said.taken if each.default is not None and each.is_default}
    both = said.arguments.get("--attention-backend", next(iter(default), None))
    choice = chosen(model, gpu)
    assert choice.prefill == said.arguments.get("--prefill-attention-backend", both)
    assert choice.decode == said.arguments.get("--decode-attention-backend", both)


@pytest.mark.parametrize(
    ("model", "gpu", "prefill", "decode", "passed_over"),
    [
        ("llama-3-8b", "a100", "flashinfer", "flashinfer", ("FLASH_ATTN",)),
        ("llama-3-8b", "b200", "trtllm_mha", "trtllm_mha", ()),
        ("gpt-oss-120b", "rtx5090", "triton", "triton", ("FLASHINFER",)),
        ("deepseek-v3", "h100", "flashinfer", "flashinfer", ()),
        ("deepseek-v3", "b200", "trtllm_mla", "trtllm_mla", ("FLASH_ATTN_MLA",)),
        ("deepseek-v3", "rtx5090", "flashinfer", "triton", ("FLASH_ATTN_MLA",)),
    ],
)
def test_choices(model: str, gpu: str, prefill: str, decode: str, passed_over: tuple[str, ...]) -> None:
    found = chosen(model, gpu)
    assert (found.prefill, found.decode, found.passed_over) == (prefill, decode, passed_over)


def test_times_of_our_kernel_choose_no_kernel_of_sglangs() -> None:
    assert chosen("llama-3-8b", "h200") == Choice("fa3", "fa3", (), ("TRITON_ATTN",))
    choice = chosen("gpt-oss-120b", "h200")
    assert (choice.prefill, choice.decode) == ("fa3", "fa3")
    assert "TRITON_ATTN" in choice.not_ours
    asked = select_model(configs_from_model("llama-3-8b", device=lookup("h200")).configs, "h200", backend="TRITON_ATTN")
    assert choose(asked, True, "") == Choice("triton", "triton", ())
    timed = select_model(configs_from_model("llama-3-8b", device=lookup("h200")).configs, "h200", workload="chat")
    assert choose(timed, True, "").decode == "fa3"


@pytest.mark.parametrize(("model", "gpu"), [("gemma-4", "h200"), ("llama-4-scout", "a100"), ("olmo-3.1-32b", "a100")])
def test_a_model_gets_a_backend_that_sglang_lets_it_have(model: str, gpu: str) -> None:
    """Of these models' order flashinfer comes first, and SGLang ends with it (``[[accepts]]`` of ``sglang.toml``)."""
    choice = chosen(model, gpu)
    assert (choice.prefill, choice.decode) == ("triton", "triton")
    assert "FLASHINFER" in choice.passed_over


def test_a_kernel_of_sglangs_own_is_taken_where_no_other_is_valid() -> None:
    wide = AttentionConfig(num_heads=8, num_kv_heads=4, head_size=512, dtype="bfloat16")
    usual = AttentionConfig(num_heads=8, num_kv_heads=4, head_size=128, dtype="bfloat16")
    alone = select(wide, "h200")
    assert choose([alone], False, "").prefill == "triton"
    # Of the usual layers' order fa3 comes first, which the wide ones do not have.
    assert choose([alone, select(usual, "h200")], False, "").decode == "triton"


def test_fields_of_server_args() -> None:
    assert Choice("fa3", "fa3", ()).declared() == {"attention_backend": "fa3"}
    assert Choice("flashinfer", "triton", ()).declared() == {
        "attention_backend": "triton",
        "prefill_attention_backend": "flashinfer",
        "decode_attention_backend": "triton",
    }
    assert Choice(None, "triton", ()).declared() == {}


def test_without_flashinfer_its_backends_are_passed_over() -> None:
    assert chosen("llama-3-8b", "b200", has_flashinfer=False).decode == "triton"
    assert chosen("deepseek-v3", "a100", has_flashinfer=False).decode == "triton"


def test_sparse_mla_is_left_to_sglang() -> None:
    assert chosen("deepseek-v3.2", "h100").declared() == {}


def name_of(backend: str, fields: dict[str, Any], gpu: str) -> str | None:
    selection = select(AttentionConfig(**fields), gpu, backend=backend)
    offers = TABLE.offers(selection, ["decode"], "attention", partial(lacks, has_flashinfer=True))
    (name,) = [offer.name for offer in offers if offer.backend == backend]
    return None if name is None else name.name


def test_kernels_decide_the_name() -> None:
    assert name_of("FLASHINFER", GQA_FIELDS, "b200") == "trtllm_mha"
    assert name_of("FLASHINFER", GQA_FIELDS, "a100") == "flashinfer"
    assert name_of("FLASH_ATTN", GQA_FIELDS, "a100") is None  # FlashAttention 2
    assert name_of("PAGED_ATTENTION", GQA_FIELDS, "a100") is None
    assert name_of("FLASHMLA", MLA_FIELDS, "h100") == "flashmla"
