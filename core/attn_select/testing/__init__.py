"""For authors of backends: the conformance suite, the test toolkit, and the float64 oracle. Needs torch.

- ``conformance``: ``BackendConformance``, a pytest class to subclass with a spec. It needs pytest.
- ``toolkit``: layers, devices and environments to ask about; the gate's answers (``plan_of``, ``reasons_of``); the
  check of facts' sources; emulated modules; a plan with other texts, which decide nothing.
- ``verdicts``: a file of what the gate says of a fixed list of layers on a GPU of each generation.
- ``strategies``: configurations, devices and environments for hypothesis, which it needs.

What is right, and how a step is drawn and run, stands in ``attn_select.reference``.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("torch") is None:
    raise ModuleNotFoundError(
        "attn_select.testing needs torch, which is not installed: pip install 'attn-select[testing]'", name="torch"
    )

from attn_select.reference.comparison import error_bound, lse_error, relative_error, same_bits
from attn_select.reference.oracle import attention_reference, merge_reference, varlen_reference
from attn_select.reference.oracle_paged import (
    gather_reference,
    paged_reference,
    slot_mapping_reference,
    write_reference,
)
from attn_select.reference.oracle_quant import pack_fp8_ds_mla, unpack_fp8_ds_mla
from attn_select.reference.problems import Problem, Request, random_problem
from attn_select.testing.toolkit import (
    ask,
    check_answers,
    check_sources,
    codes_of,
    emulated_modules,
    environment_of,
    gqa_layer,
    load_path_of,
    mla_layer,
    plan_of,
    reasons_of,
    selection_of,
    with_other_texts,
)

if TYPE_CHECKING:
    from attn_select.testing.conformance import BackendConformance as BackendConformance

__all__ = [
    "Problem",
    "Request",
    "ask",
    "attention_reference",
    "check_answers",
    "check_sources",
    "codes_of",
    "emulated_modules",
    "environment_of",
    "error_bound",
    "gather_reference",
    "gqa_layer",
    "load_path_of",
    "lse_error",
    "merge_reference",
    "mla_layer",
    "pack_fp8_ds_mla",
    "paged_reference",
    "plan_of",
    "random_problem",
    "reasons_of",
    "relative_error",
    "same_bits",
    "selection_of",
    "slot_mapping_reference",
    "unpack_fp8_ds_mla",
    "varlen_reference",
    "with_other_texts",
    "write_reference",
]


def __getattr__(name: str) -> Any:
    if name != "BackendConformance":
        raise AttributeError(f"module 'attn_select.testing' has no attribute {name!r}")
    import importlib

    import pytest

    # Before the first import, so that a failing assert shows its values.
    pytest.register_assert_rewrite("attn_select.testing.conformance")
    return importlib.import_module("attn_select.testing.conformance").BackendConformance
