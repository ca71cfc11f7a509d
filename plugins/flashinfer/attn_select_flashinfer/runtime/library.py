"""The one place that imports FlashInfer: its entries by name, each checked once against what this plugin passes.

Everything else calls ``library.flashinfer()``. A test replaces that function by one that returns the same class with
emulated entries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from attn_select.backends.kernel_builds import KernelBuild
from attn_select.errors import KernelMismatchError
from attn_select.runtime.backend import AttentionBackend
from attn_select.runtime.installed_builds import InstalledBuild
from attn_select_flashinfer.facts.libraries import FLASHINFER_PYTHON

_LISTS = "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads"
_STEP = "causal sm_scale window_left logits_soft_cap q_data_type kv_data_type"
_BUFFERS = "qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf"
_TRTLLM = (
    "query kv_cache workspace_buffer block_tables seq_lens bmm1_scale bmm2_scale window_left out out_dtype o_sf_scale "
    "sinks kv_layout lse return_lse"
)
SINKS = "attention_sink_decl"
"""FlashInfer's CUDA source of the variant with attention sinks, by kernel (``fa2``, ``fa3``)."""

PARAMETERS: dict[str, dict[str, str]] = {
    "BatchPrefillWithPagedKVCacheWrapper": {
        "__init__": f"float_workspace_buffer kv_layout use_cuda_graph {_BUFFERS} backend jit_args jit_kwargs",
        "plan": f"{_LISTS} head_dim_qk page_size {_STEP} o_data_type disable_split_kv seq_lens max_token_per_sequence",
        "run": "q paged_kv_cache q_scale v_scale out lse return_lse",
    },
    "BatchDecodeWithPagedKVCacheWrapper": {
        "__init__": "float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
        "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend",
        "plan": "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size",
        "run": "q paged_kv_cache q_scale v_scale out lse return_lse",
    },
    "merge_state_in_place": {"": "v s v_other s_other"},
    "chunk_gated_delta_rule": {
        "": "q k v g beta scale initial_state output_final_state cu_seqlens output_state",
    },
    "gated_delta_rule_decode_pretranspose": {
        "": "q k v state A_log a dt_bias b scale use_qk_l2norm initial_state initial_state_indices "
        "output_state_indices",
    },
    "selective_state_update": {
        "": "state x dt A B C D dt_bias dt_softplus state_batch_indices dst_state_batch_indices",
    },
    "FP4Tensor": {"__init__": "data scale scale_start_index original_shape"},
    "BatchPrefillWithRaggedKVCacheWrapper": {
        "__init__": "float_workspace_buffer kv_layout backend",
        "plan": "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo causal sm_scale window_left "
        "logits_soft_cap q_data_type kv_data_type",
        "run": "q k v out lse return_lse",
    },
    "BatchMLAPagedAttentionWrapper": {
        "__init__": "float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend",
        "plan": "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size causal "
        "sm_scale q_data_type kv_data_type",
        "run": "q_nope q_pe ckv_cache kpe_cache out lse return_lse ckv_scale kpe_scale return_lse_base_on_e",
    },
    "trtllm_batch_context_with_kv_cache": {
        "": f"{_TRTLLM} max_q_len max_kv_len batch_size cum_seq_lens_q cum_seq_lens_kv"
    },
    "trtllm_batch_decode_with_kv_cache": {"": f"{_TRTLLM} max_seq_len q_len_per_req mask backend"},
    "trtllm_batch_decode_with_kv_cache_mla": {
        "": "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens "
        "max_seq_len sparse_mla_top_k out bmm1_scale bmm2_scale sinks backend lse return_lse "
        "kv_scale_format"
    },
    "trtllm_ragged_attention_deepseek": {
        "": "query key value workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale o_sf_scale "
        "batch_size window_left cum_seq_lens_q cum_seq_lens_kv enable_pdl is_causal return_lse attention_sinks out lse"
    },
    SINKS: {},
    "fmha_varlen": {"": "q k v qo_segment_offsets kv_segment_offsets max_qo_len out lse causal sm_scale return_lse"},
}
"""What is passed to each entry, by class and method (empty for a function); to what is only read, nothing."""
METADATA = "MLAPlanMetadata"
"""What the MLA wrapper plans from since 0.7; releases without it take flat lists."""
WITH_METADATA = {
    "BatchMLAPagedAttentionWrapper": {
        "__init__": PARAMETERS["BatchMLAPagedAttentionWrapper"]["__init__"],
        "plan": "metadata num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale q_data_type kv_data_type "
        "query_layout kv_cache_layout lse_mode",
        "run": "query kv_cache out lse return_lse ckv_scale kpe_scale return_lse_base_on_e",
    },
    METADATA: {"csr": "qo_indptr kv_indptr kv_indices kv_len_arr"},
    "recurrent_kda": {
        "": "q k v g beta A_log dt_bias scale initial_state use_qk_l2norm_in_kernel use_gate_in_kernel beta_is_logit "
        "cu_seqlens ssm_state_indices initial_state_source initial_state_indices",
    },
    "ssd_combined_fwd": {
        "": "x dt A B C dt_bias dt_softplus initial_states seq_idx chunk_indices chunk_offsets",
    },
}
"""What is passed to a release that has ``METADATA``, in the place of the former or beside them."""

MODULES = {
    "trtllm_batch_context_with_kv_cache": "flashinfer.prefill",
    "trtllm_ragged_attention_deepseek": "flashinfer.prefill",
    "fmha_varlen": "flashinfer.prefill",
    "trtllm_batch_decode_with_kv_cache": "flashinfer.decode",
    "trtllm_batch_decode_with_kv_cache_mla": "flashinfer.mla",
    "BatchMLAPagedAttentionWrapper": "flashinfer.mla",
    METADATA: "flashinfer.mla",
    "FP4Tensor": "flashinfer.utils",
    "chunk_gated_delta_rule": "flashinfer.gdn_prefill",
    "gated_delta_rule_decode_pretranspose": "flashinfer.gdn_decode",
    "selective_state_update": "flashinfer.mamba",
    "ssd_combined_fwd": "flashinfer.mamba",
    SINKS: "flashinfer.attention._core",
}
"""Where an entry is imported from, ``flashinfer`` unless it stands here."""


# Each is imported and compared with what this plugin passes when it is first asked for, so a release that changed
# one still serves the kernels behind the others. ``MLAPlanMetadata`` is None before 0.7, ``attention_sink_decl`` a
# dict of CUDA sources.
class FlashInfer:
    """FlashInfer's classes and functions that the runtimes call, as attributes by their names in ``PARAMETERS``."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        # find: returns an entry by its name, or raises ``KernelMismatchError``
        self._find = find

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        entry = self._find(name)
        setattr(self, name, entry)
        return entry

    def check(self, *names: str) -> None:
        """Import and compare entries that will be called later."""
        for name in names:
            getattr(self, name)


class _Installed(InstalledBuild):
    def mismatch(self, what: str) -> KernelMismatchError:
        """Name FlashInfer alone: these backends take their kernels from no other distribution."""
        return KernelMismatchError(f"{self.build.label}: {what}", hint=self.build.library.install)


@cache
def flashinfer() -> FlashInfer:
    """Import FlashInfer and return its entries, which are compared one by one.

    Raises:
        KernelMismatchError: it is not installed or cannot be imported, or its version is not one that this plugin was
            written for. It is an ``ImportError`` as well.
    """
    installed = _Installed(KernelBuild(kernel="FlashInfer", library=FLASHINFER_PYTHON, module="flashinfer"))
    return FlashInfer(lambda name: _found(installed, name))


class FlashInferLibraryBackend(AttentionBackend):
    """A backend of this plugin."""

    @classmethod
    def prepare(cls) -> None:
        """Make sure that FlashInfer is there, in a release that this plugin was written for."""
        flashinfer()


def _found(installed: InstalledBuild, name: str) -> Any:
    """Return what ``FlashInfer`` has under a name."""
    with_metadata = hasattr(installed.imported(MODULES[METADATA]), METADATA)
    if name == METADATA and not with_metadata:
        return None
    parameters = {**PARAMETERS, **WITH_METADATA} if with_metadata else PARAMETERS
    if name not in parameters:
        raise installed.mismatch(f"flashinfer.{name} is called as releases from 0.7.2 on have it")
    return _entry(installed, name, parameters[name])


def _entry(installed: InstalledBuild, name: str, methods: dict[str, str]) -> Any:
    """Return a function, or a class, after comparing what of it is called."""
    module = installed.imported(MODULES.get(name, "flashinfer"))
    entry = getattr(module, name, None)
    if entry is None:
        raise installed.mismatch(f"{module.__name__}.{name} does not exist")
    for method, keywords in methods.items():
        label, called = f"{module.__name__}.{name}", entry
        if method:
            label, called = f"{label}.{method}", getattr(entry, method, None)
        if called is None:
            raise installed.mismatch(f"{label} does not exist")
        bound = not method or inspect.ismethod(called)  # of a class method the first parameter is not shown
        installed.check(called, label, [] if bound else ["self"], keywords.split())
    return entry
