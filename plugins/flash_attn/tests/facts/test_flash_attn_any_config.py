"""The plan functions answer every valid config on every device with every set of installed builds."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig
from attn_select.machine.environment import Environment
from attn_select.testing import check_answers
from attn_select.testing.strategies import capabilities, configs, environments
from attn_select_flash_attn.facts.builds import BUILDS, LIBRARIES, FlashAttnKernel, build_of
from attn_select_flash_attn.facts.flash_attn import FLASH_ATTN
from attn_select_flash_attn.facts.flash_attn_mla import FLASH_ATTN_MLA
from attn_select_flash_attn.facts.flash_attn_mla_sparse import FLASH_ATTN_MLA_SPARSE

OPTIONS = st.fixed_dictionaries({}, optional={"provider": st.sampled_from([build.distribution for build in BUILDS])})


@given(
    config=configs(),
    where=capabilities(),
    environment=environments(LIBRARIES[1]),
    options=OPTIONS,
    version=st.sampled_from(["auto", 2, 3]),
    hybrid=st.booleans(),
)
def test_plan_answers_every_config(
    config: AttentionConfig,
    where: tuple[int, int] | None,
    environment: Environment,
    options: dict[str, Any],
    version: Any,
    hybrid: bool,
) -> None:
    if config.sparse:
        spec, made = FLASH_ATTN_MLA_SPARSE, FLASH_ATTN_MLA_SPARSE.options(**options)
    elif config.mla:
        spec, made = FLASH_ATTN_MLA, FLASH_ATTN_MLA.options(prefill_version=version, **options)
    else:
        spec, made = FLASH_ATTN, FLASH_ATTN.options(version=version, hybrid=hybrid, **options)
    for phase, outcome in check_answers(spec, config, where, environment=environment, options=made).items():
        if isinstance(outcome, BackendPlan):
            kernel = outcome.kernel
            assert isinstance(kernel, FlashAttnKernel)
            assert kernel.paged == bool(outcome.kv_layouts)
            assert options.get("provider", kernel.provider) == kernel.provider
            assert version in ("auto", kernel.version) or (config.mla and (phase == "decode" or config.sparse))
            build = build_of(kernel)
            assert environment.has(build.library)
            assert outcome.provider == build.provider
            continue
        for reason in outcome:
            assert type(reason.observed) not in (int, str) or str(reason.observed) in reason.message
