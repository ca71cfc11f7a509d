"""One attention backend for attn-select: the facts. Importing this imports no torch."""

from attn_select import hookimpl
from attn_select.backends.spec import (
    BackendPlan,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Reason,
)
from attn_select.layer.layouts import FLASH_ATTN_NHD, FLASHINFER_NHD

RAN = "ran on CPU, torch 2.13.0"
CAPABILITIES = Capabilities(
    compute_capabilities=Fact(ComputeCapabilities((((8, 0), (9, 9)),), cpu=True), f"{RAN}; GPUs unverified"),
    dtypes=Fact(("bfloat16", "float32"), RAN),
    kv_cache_dtypes=Fact(("bfloat16", "float32"), RAN),
    head_sizes=Fact(HeadSizes(values=(64, 128)), RAN),
    block_sizes=Fact((16,), RAN),
    sliding_window=Fact(True, RAN),
)
SERVED = {"prefill": CAPABILITIES, "decode": CAPABILITIES}


def plan(config, device, environment, options, phase):
    if config.num_heads // config.num_kv_heads > 8:
        return [Reason("acme-group", "more than 8 query heads per KV head", config.num_heads // config.num_kv_heads, 8)]
    return BackendPlan(
        path="einsum",
        because="the only path",
        query_dtype=config.dtype,
        returns_lse=True,
        kv_layouts=(FLASH_ATTN_NHD, FLASHINFER_NHD),
        kernel_block_sizes=(16,),
        cuda_graph="NEVER",
    )


ACME_ATTN = BackendSpec(
    name="ACME_ATTN",
    summary="Acme's kernels",
    capabilities=SERVED,
    plan=plan,
    load="acme_runtime:AcmeBackend",
    rank=("before", "TORCH_SDPA"),
)


@hookimpl
def attn_select_register_backends():
    return [ACME_ATTN]
