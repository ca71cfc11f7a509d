"""Every backend's plan function answers every valid layer, on any device, whatever is installed and set."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.backends.registry import load_plugins
from attn_select.backends.spec import BackendPlan, BackendSpec, StateCapabilities
from attn_select.layer.config import AttentionConfig
from attn_select.testing import check_answers
from attn_select.testing.strategies import capabilities, configs, environments

SPECS = [
    spec
    for spec in load_plugins().specs.values()
    if not any(isinstance(each, StateCapabilities) for each in spec.capabilities.values())
]
VERSIONS = ("0.1", "0.6.14", "0.7.2.post1", "3.7.0+git1234", "99", "nightly")


def drawn_options(spec: BackendSpec, data: st.DataObject) -> Any:
    """Draw the options that are one of a few values."""
    kinds: dict[str, st.SearchStrategy[Any]] = {}
    for name, field in spec.options.model_fields.items():
        if get_origin(field.annotation) is Literal:
            kinds[name] = st.sampled_from(get_args(field.annotation))
        elif field.annotation is bool:
            kinds[name] = st.booleans()
    return spec.options(**data.draw(st.fixed_dictionaries({}, optional=kinds)))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@given(data=st.data(), where=capabilities())
def test_every_layer_is_answered(spec: BackendSpec, data: st.DataObject, where: tuple[int, int] | None) -> None:
    (sort,) = {each.sort for each in spec.capabilities.values()}
    config: AttentionConfig = data.draw(configs(mla="mla" in sort, sparse="sparse" in sort))
    libraries = [library for group in spec.libraries for library in group]
    versions = {library.distribution: VERSIONS for library in libraries}
    environment = data.draw(environments(libraries, versions))
    options = drawn_options(spec, data)
    found = check_answers(spec, config, where, environment=environment, options=options)
    for plan in found.values():
        if not isinstance(plan, BackendPlan):
            continue
        hash(plan.kernel)
        assert plan.kernel is not None, "a plan says what runs"
        provider = getattr(plan.kernel, "provider", None)
        assert getattr(options, "provider", "auto") in ("auto", provider)
