"""The emulated vLLM has the signatures of the installed one. Runs where vLLM is installed (``make test-engines``)."""

from __future__ import annotations

import importlib
import inspect
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_emulated

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

PLACES = {
    "AttentionBackend": "vllm.v1.attention.backend",
    "AttentionCGSupport": "vllm.v1.attention.backend",
    "AttentionImpl": "vllm.v1.attention.backend",
    "AttentionMetadataBuilder": "vllm.v1.attention.backend",
    "AttentionType": "vllm.v1.attention.backend",
    "CommonAttentionMetadata": "vllm.v1.attention.backend",
    "MultipleOf": "vllm.v1.attention.backend",
    "AttentionSelectorConfig": "vllm.v1.attention.selector",
    "MLACommonBackend": "vllm.model_executor.layers.attention.mla_attention",
    "MLACommonImpl": "vllm.model_executor.layers.attention.mla_attention",
    "MLACommonMetadata": "vllm.model_executor.layers.attention.mla_attention",
    "MLACommonMetadataBuilder": "vllm.model_executor.layers.attention.mla_attention",
    "QueryLenSupport": "vllm.model_executor.layers.attention.mla_attention",
}


def real(name: str) -> Any:
    return getattr(importlib.import_module(PLACES[name]), name)


@pytest.mark.parametrize("name", PLACES)
def test_members_are_the_installed_ones(name: str) -> None:
    emulated, installed = getattr(vllm_emulated, name), real(name)
    if hasattr(emulated, "__members__"):
        assert set(emulated.__members__) <= set(installed.__members__)
    for method in [n for n, value in vars(emulated).items() if inspect.isfunction(value) and not n.startswith("__")]:
        assert hasattr(installed, method)


@pytest.mark.parametrize("name", ["AttentionMetadataBuilder", "MLACommonMetadataBuilder", "MLACommonImpl"])
def test_constructors_take_the_same(name: str) -> None:
    emulated = list(inspect.signature(getattr(vllm_emulated, name).__init__).parameters)
    installed = list(inspect.signature(real(name).__init__).parameters)
    assert installed[: len(emulated)] == emulated


@pytest.mark.parametrize("name", ["CommonAttentionMetadata", "AttentionSelectorConfig"])
def test_fields_are_there(name: str) -> None:
    emulated = list(inspect.signature(getattr(vllm_emulated, name)).parameters)
    assert set(emulated) <= set(inspect.signature(real(name)).parameters)


def test_every_flag_of_a_question_is_judged() -> None:
    from attn_select_vllm.kernels.limits import JUDGED

    fields = inspect.signature(real("AttentionSelectorConfig")).parameters
    assert {name for name in fields if name.startswith(("use_", "has_"))} <= JUDGED


@pytest.mark.parametrize("method", ["forward", "do_kv_cache_update"])
def test_attention_calls_the_impl_as_we_define_it(method: str) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from attn_select_vllm.kernels.attention import OwnImpl

    ours = list(inspect.signature(getattr(OwnImpl, method)).parameters)
    assert ours == list(inspect.signature(getattr(CPUAttentionBackendImpl, method)).parameters)


def test_mla_calls_the_impl_as_we_define_it() -> None:
    from attn_select_vllm.kernels.mla import OwnMLAImpl

    ours = list(inspect.signature(OwnMLAImpl.forward_mqa).parameters)
    assert ours == list(inspect.signature(real("MLACommonImpl").forward_mqa).parameters)


def test_queries_are_joined_as_we_call_it() -> None:
    from vllm import _custom_ops

    emulated = inspect.signature(vllm_emulated.concat_mla_q).parameters
    assert list(inspect.signature(_custom_ops.concat_mla_q).parameters) == list(emulated)


@pytest.mark.parametrize(
    "method", ["build", "build_for_cudagraph_capture", "build_for_drafting", "get_cudagraph_support"]
)
def test_builders_are_called_as_we_define_them(method: str) -> None:
    from attn_select_vllm.kernels.attention import OwnBuilder

    ours = list(inspect.signature(getattr(OwnBuilder, method)).parameters)
    assert ours == list(inspect.signature(getattr(real("AttentionMetadataBuilder"), method)).parameters)


def test_drafts_with_slots_of_their_own_leave_the_bounds_behind() -> None:
    """What ``of_drafts`` mends; where vLLM does it, the bounds would be too large, which costs time alone."""
    import torch
    from vllm.config import SpeculativeConfig
    from vllm.v1.spec_decode.utils import extend_all_queries_by_N

    from attn_select_vllm.kernels.batch import of_drafts

    assert isinstance(SpeculativeConfig.max_num_new_slots_for_drafting, property)
    lens, starts = torch.tensor([7, 9], dtype=torch.int32), torch.tensor([0, 3, 6], dtype=torch.int32)
    tables = {"block_table_tensor": torch.zeros(2, 1, dtype=torch.int32), "slot_mapping": torch.arange(6)}
    sizes = {"num_reqs": 2, "num_actual_tokens": 6, "max_query_len": 3, "max_seq_len": 9}
    bounds = {"query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens_cpu_upper_bound": lens}
    verified = real("CommonAttentionMetadata")(seq_lens=lens, **bounds, **sizes, **tables)
    drafting = extend_all_queries_by_N(verified, 2, torch.arange(3), torch.arange(10))
    assert drafting.seq_lens_cpu_upper_bound.tolist() == lens.tolist()
    config = SimpleNamespace(speculative_config=SimpleNamespace(max_num_new_slots_for_drafting=2))
    assert of_drafts(drafting, config).seq_lens_cpu_upper_bound.tolist() == drafting.seq_lens.tolist() == [9, 11]


def test_the_platform_is_asked_as_we_wrap_it() -> None:
    from vllm.platforms.cpu import CpuPlatform

    emulated = inspect.signature(vllm_emulated.Platform.get_attn_backend_cls).parameters
    assert list(inspect.signature(CpuPlatform.get_attn_backend_cls).parameters) == list(emulated)


def test_vllms_own_choice_is_known_by_its_path() -> None:
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    asked = real("AttentionSelectorConfig")(head_size=64, dtype=torch.float32, kv_cache_dtype="auto", block_size=None)
    assert CpuPlatform.get_attn_backend_cls(None, asked) == AttentionBackendEnum.CPU_ATTN.value
    triton = AttentionBackendEnum.TRITON_ATTN  # as a GPU's platform says it
    assert ".".join(triton.get_class().full_cls_name()) == triton.value


def test_vllms_own_choice_of_mla_prefill_is_asked_for_as_we_do() -> None:
    from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend

    emulated = inspect.signature(vllm_emulated.get_mla_prefill_backend).parameters
    assert list(inspect.signature(get_mla_prefill_backend).parameters) == list(emulated)


@pytest.mark.parametrize("method", ["info_once", "warning_once"])
def test_the_logger_says_things_once(method: str) -> None:
    from vllm.logger import init_logger

    ours = list(inspect.signature(getattr(vllm_emulated.Log(), method)).parameters)
    assert ours == list(inspect.signature(getattr(init_logger("vllm.attn_select"), method)).parameters)


def test_every_backend_answers_vllm() -> None:
    """vLLM reads these of any backend; a name must be a registered one."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from attn_select_vllm.names import OWN_KERNELS, OWN_PREFIX

    for name, path in OWN_KERNELS.items():
        backend = resolve_obj_by_qualname(path)
        assert backend.get_name() == OWN_PREFIX + name
        assert backend.is_mla() == ("MLA" in name)
        assert backend.supports_block_size(backend.get_preferred_block_size(16))
        assert backend.supports_kv_connector()
        assert not backend.supports_device_cpu_query_lens_mismatch()
        assert backend.get_builder_cls().__init__ is not object.__init__
        assert backend.get_impl_cls().backend == name


def test_the_cache_of_choices_can_be_left_out() -> None:
    from vllm.v1.attention import selector

    assert "attn_selector_config" in inspect.signature(selector._cached_get_attn_backend.__wrapped__).parameters
