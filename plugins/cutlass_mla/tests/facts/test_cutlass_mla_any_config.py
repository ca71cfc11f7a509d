"""The plan function answers every valid config on every device with every set of installed builds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attn_select.backends.spec import BackendPlan, Library
from attn_select.layer.config import AttentionConfig
from attn_select.testing import check_answers
from attn_select.testing.strategies import capabilities, configs
from attn_select_cutlass_mla.facts.builds import BUILDS, LIBRARIES, CutlassMLAKernel, build_of
from attn_select_cutlass_mla.facts.cutlass_mla import CUTLASS_MLA

NAMES = [build.distribution for build in BUILDS]


@given(
    config=configs(mla=True),
    where=st.sampled_from([(10, 0), (10, 3)]) | capabilities(),
    missing=st.sets(st.sampled_from(LIBRARIES[1])),
    provider=st.sampled_from(["auto", *NAMES]),
    splits=st.sampled_from([-1, 1, 16]),
    forced=st.none() | st.sampled_from(["-1", "8", "16", "many"]) | st.text(max_size=8),
)
def test_plan_answers_every_config(
    config: AttentionConfig,
    where: tuple[int, int] | None,
    missing: set[Library],
    provider: str,
    splits: int,
    forced: str | None,
) -> None:
    variables = {} if forced is None else {"FORCE_NUM_KV_SPLITS": forced}
    options = CUTLASS_MLA.options(provider=provider, num_kv_splits=splits)  # type: ignore[call-arg]
    found = check_answers(CUTLASS_MLA, config, where, options=options, missing=missing, variables=variables)
    outcome = found["decode"]
    if isinstance(outcome, BackendPlan):
        kernel = outcome.kernel
        assert isinstance(kernel, CutlassMLAKernel)
        assert where in ((10, 0), (10, 3))
        assert provider in ("auto", kernel.provider)
        assert build_of(kernel).library not in missing
        assert outcome.provider == build_of(kernel).provider
