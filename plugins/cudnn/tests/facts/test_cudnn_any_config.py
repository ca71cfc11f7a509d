"""The plan function answers every valid config on every device with every set of installed libraries."""

from __future__ import annotations

from hypothesis import given

from attn_select.backends.spec import BackendPlan
from attn_select.layer.config import AttentionConfig
from attn_select.machine.environment import Environment
from attn_select.testing import check_answers
from attn_select.testing.strategies import capabilities, configs, environments
from attn_select_cudnn.facts.cudnn_attn import CUDNN_ATTN, FRONTEND, CudnnKernel


@given(config=configs(), where=capabilities(), environment=environments((FRONTEND,)))
def test_plan_answers_every_config(
    config: AttentionConfig, where: tuple[int, int] | None, environment: Environment
) -> None:
    for outcome in check_answers(CUDNN_ATTN, config, where, environment=environment).values():
        if isinstance(outcome, BackendPlan):
            assert outcome.kernel == CudnnKernel()
