"""The limits of attn-select's kernels inside SGLang: models of which the adapter does not pass everything on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attn_select.errors import ModelError
from attn_select.layer.models import configs_from_model
from attn_select_sglang.kernels.cache_views import pools_of
from attn_select_sglang.kernels.sinks import sinks_of
from attn_select_sglang.names import OWN_KERNELS


def limits(model_runner: Any, layers: Sequence[Any]) -> list[str]:
    """Return why attn-select's kernels do not run the layers of a model; empty if they do."""
    try:
        kinds = configs_from_model(model_runner.model_config.hf_config)
    except ModelError as error:
        return [f"the model's config does not describe its layers: {error.message}"]
    if kinds.unserved:
        return [f"attn-select has no kernel for its {each.kind} layers" for each in kinds.unserved]
    read = kinds.attention_configs
    pools, mla = pools_of(model_runner.token_to_kv_pool), model_runner.use_mla_backend
    wanted = "MLATokenToKVPool" if mla else "MHATokenToKVPool"
    unknown = [name for pool in pools if (name := type(pool).__name__) != wanted]
    arguments = model_runner.server_args
    found = {
        **(_mla_limits(model_runner, layers) if mla else {}),
        "the adapter serves drafts by NGRAM alone": not model_runner.spec_algorithm.is_none()
        and not model_runner.spec_algorithm.is_ngram(),
        "the adapter serves no drafts with MLA or windows": drafts_of(model_runner) > 0
        and (mla or any(layer.sliding_window_size > -1 for layer in layers)),
        "the adapter serves no context parallelism": max(arguments.attn_cp_size, arguments.dcp_size) > 1,
        "the adapter serves no overlap of two batches": arguments.enable_two_batch_overlap,
        "the adapter serves decoder layers alone": any(
            layer.is_cross_attention or layer.attn_type.value != "decoder" for layer in layers
        ),
        "the adapter finds no sinks in the model": any(config.sinks for config in read)
        and (mla or not sinks_of(model_runner.model)),
        "the adapter passes no image ranges": any(config.mm_prefix for config in read),
        "the adapter passes no chunks of attention": any(layer.use_irope for layer in layers),
        "the adapter passes no temperature by length": any(layer.xai_temperature_len > 0 for layer in layers),
        "the adapter caps by tanh alone": any(
            layer.logit_cap and layer.logit_capping_method != "tanh" for layer in layers
        ),
        "the adapter passes no ALiBi slopes": any(config.alibi for config in read),
        "the adapter reads pools of layout nhd alone": any(
            getattr(pool, "kv_cache_layout", "nhd") != "nhd" for pool in pools
        ),
        f"the adapter reads no {' and no '.join(unknown)}": bool(unknown),
    }
    return [reason for reason, holds in found.items() if holds]


def _mla_limits(model_runner: Any, layers: Sequence[Any]) -> dict[str, bool]:
    """Return what keeps the kernels from an MLA model, and whether it does."""
    pool, graphs = model_runner.token_to_kv_pool, model_runner.server_args.cuda_graph_config
    return {
        "the adapter serves MLA layers that have an attn_mqa and an attn_mha alone": len(layers)
        != 2 * len(mla_layers(model_runner.model)),
        "the adapter serves no sparse MLA": getattr(pool, "use_dsa", False),
        f"the adapter reads latents in {model_runner.dtype} alone, the model's dtype": pool.dtype != model_runner.dtype,
        "the adapter runs no MLA prompts in CUDA graphs (--cuda-graph-backend-prefill disabled turns them off)": (
            graphs is not None
            and graphs.prefill.backend != "disabled"
            and model_runner.prefill_attention_backend_str in OWN_KERNELS
        ),
    }


def mla_layers(model: Any) -> list[tuple[Any, Any]]:
    """Return SGLang's two ``RadixAttention`` of every MLA layer: on latents, and on decompressed keys and values."""
    return [(each.attn_mqa, each.attn_mha) for each in model.modules() if hasattr(each, "attn_mqa")]


def drafts_of(model_runner: Any) -> int:
    """Return how many tokens a step checks of each request beside the one that is known."""
    if model_runner.spec_algorithm.is_none():
        return 0
    return int(model_runner.server_args.speculative_num_draft_tokens) - 1


def captures(model_runner: Any) -> bool:
    """Whether SGLang is to capture decodes as CUDA graphs."""
    return torch.device(model_runner.device).type == "cuda" and not model_runner.server_args.disable_cuda_graph
