"""The plan functions answer every valid config on every device, whatever options and release."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig
from attn_select.machine.environment import Environment
from attn_select.testing import check_answers
from attn_select.testing.strategies import capabilities, configs, environments
from attn_select_flashinfer.facts import mha_kernels, mla_kernels
from attn_select_flashinfer.plugin import attn_select_register_backends

SPECS = {spec.name: spec for spec in attn_select_register_backends()}
ENVIRONMENTS = environments(versions={"flashinfer-python": ["0.6.14", "0.6.15", "0.6.16", "0.7.2.post1"]})
OPTIONS = {
    "FLASHINFER": {
        "use_trtllm": st.sampled_from(["auto", True, False]),
        "prefill_kernel": st.sampled_from(get_args(mha_kernels.PrefillKernel)),
        "decode_kernel": st.sampled_from(get_args(mha_kernels.DecodeKernel)),
    },
    "FLASHINFER_MLA": {
        "decode_kernel": st.sampled_from(get_args(mla_kernels.DecodeKernel)),
        "prefill_kernel": st.sampled_from(get_args(mla_kernels.PrefillKernel)),
    },
    "FLASHINFER_MLA_SPARSE": {},
}


@given(config=configs(), where=capabilities(), environment=ENVIRONMENTS, data=st.data())
def test_plan_answers_every_config(
    config: AttentionConfig, where: tuple[int, int] | None, environment: Environment, data: Any
) -> None:
    name = "FLASHINFER"
    if config.mla:
        name = "FLASHINFER_MLA_SPARSE" if config.sparse else "FLASHINFER_MLA"
    options = data.draw(st.fixed_dictionaries({}, optional=OPTIONS[name]))
    spec = SPECS[name]
    found = check_answers(spec, config, where, environment=environment, options=spec.options(**options))
    for phase, plan in found.items():
        if isinstance(plan, BackendPlan):
            assert where is not None
            assert where >= ((7, 5) if name == "FLASHINFER" else (8, 0))
            assert plan.unverified or where >= (8, 0)
            assert plan.workspace_bytes > 0
            hash(plan.kernel)
            if config.block_size is not None:
                assert all(config.block_size % size == 0 for size in plan.kernel_block_sizes)
            assert bool(plan.kernel_block_sizes) is spec.capabilities[phase].reads_cache
