"""The plan functions answer every valid MLA config on every device with every set of installed builds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig
from attn_select.machine.environment import Environment
from attn_select.testing import check_answers
from attn_select.testing.strategies import capabilities, configs, environments
from attn_select_flashmla.facts.builds import BUILDS, LIBRARIES, FlashMLAKernel, build_of
from attn_select_flashmla.facts.flashmla import FLASHMLA
from attn_select_flashmla.facts.flashmla_sparse import FLASHMLA_SPARSE


@given(
    config=configs(mla=True),
    where=st.sampled_from([(9, 0), (10, 0), (10, 3)]) | capabilities(),
    environment=environments(LIBRARIES[1]),
    provider=st.sampled_from(["auto", *(build.distribution for build in BUILDS)]),
)
def test_plan_answers_every_config(
    config: AttentionConfig, where: tuple[int, int] | None, environment: Environment, provider: str
) -> None:
    spec = FLASHMLA_SPARSE if config.sparse else FLASHMLA
    options = spec.options(provider=provider)  # type: ignore[call-arg]
    for outcome in check_answers(spec, config, where, environment=environment, options=options).values():
        if isinstance(outcome, BackendPlan):
            kernel = outcome.kernel
            assert isinstance(kernel, FlashMLAKernel)
            assert provider in ("auto", kernel.provider)
            assert environment.has(build_of(kernel).library)
            assert outcome.provider == build_of(kernel).provider
            assert kernel.function.startswith("sparse") == config.sparse
            continue
        for reason in outcome:
            assert type(reason.observed) not in (int, str) or str(reason.observed) in reason.message
