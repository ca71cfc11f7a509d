"""One attention backend for attn-select: GQA decode and prefill with the kernels of `acme-kernels`."""

from attn_select import hookimpl
from attn_select.layouts import FLASH_ATTN_NHD
from attn_select.spec import BackendPlan, BackendSpec, Capabilities, ComputeCapabilities, Fact, HeadSizes, Reason

CAPABILITIES = Capabilities(
    compute_capabilities=Fact(ComputeCapabilities((((8, 0), (9, 9)),)), "acme-kernels setup.py 1.2"),
    dtypes=Fact(("bfloat16", "float16"), "acme-kernels csrc/attention.cu 1.2"),
    kv_cache_dtypes=Fact(("bfloat16", "float16"), "acme-kernels csrc/attention.cu 1.2"),
    head_sizes=Fact(HeadSizes(values=(64, 128)), "acme-kernels csrc/attention.cu 1.2"),
    block_sizes=Fact((16,), "acme-kernels csrc/attention.cu 1.2"),
    sliding_window=Fact(True, "acme-kernels csrc/attention.cu 1.2"),
)


def plan(config, device, environment, options, phase):
    if config.num_heads // config.num_kv_heads > 8:
        return [Reason("acme-group", "more than 8 query heads per KV head", config.num_heads // config.num_kv_heads, 8)]
    return BackendPlan("acme", "the only path", config.dtype, True, (FLASH_ATTN_NHD,), (16,), "UNIFORM_BATCH")


def load():
    import acme_kernels

    return acme_kernels.AttentionBackend


@hookimpl
def attn_select_register_backends():
    served = {"prefill": CAPABILITIES, "decode": CAPABILITIES}
    return [BackendSpec(name="ACME_ATTN", summary="Acme's kernels", capabilities=served, plan=plan, load=load)]
