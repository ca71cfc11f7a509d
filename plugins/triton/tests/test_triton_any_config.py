"""The Triton backends answer every valid config on every device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.backends.spec import BackendSpec
from attn_select.layer.config import AttentionConfig
from attn_select.machine.environment import Environment
from attn_select.testing import check_answers
from attn_select.testing.strategies import capabilities, configs, environments
from attn_select_triton.facts.paged_attention import PAGED_ATTENTION
from attn_select_triton.facts.triton_attn import TRITON_ATTN
from attn_select_triton.facts.triton_mla import TRITON_MLA

TRITONS = {"triton": ("3.6.0", "3.7.0", "3.7.0+git1234", "3", "4.0rc1", "nightly")}


@pytest.mark.parametrize(
    ("spec", "mla"),
    [(TRITON_ATTN, False), (TRITON_MLA, True), (PAGED_ATTENTION, False)],
    ids=["TRITON_ATTN", "TRITON_MLA", "PAGED_ATTENTION"],
)
@given(data=st.data(), where=capabilities(), environment=environments(versions=TRITONS))
def test_every_config_is_answered(
    spec: BackendSpec, mla: bool, data: st.DataObject, where: tuple[int, int] | None, environment: Environment
) -> None:
    config: AttentionConfig = data.draw(configs(mla=mla))
    outcomes = check_answers(spec, config, where, environment=environment)
    for outcome in outcomes.values():
        hash(getattr(outcome, "kernel", None))
        assert isinstance(outcome, list) or outcome.kernel is not None, "a plan says what runs"
