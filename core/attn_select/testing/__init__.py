"""For authors of backends: the conformance suite, and the float64 oracle that it compares with. Needs torch.

- ``conformance``: ``BackendConformance``, a pytest class to subclass with a spec. It alone needs pytest.
- ``error_bounds``: how far a result may be from the oracle, per dtype and path.
- ``oracle``: attention, its mask, and the merge of partials; the conventions are stated there.
- ``oracle_paged``: the same on a paged cache of any layout, writing the cache, slot mappings.
- ``oracle_mla``: multi-head latent attention, decompressed, absorbed and sparse.
- ``oracle_quant``: FP8 with scales, and the 656-byte token of sparse MLA.
- ``oracle_random``: random batches on poisoned memory (``oracle_problems.Problem``).
- ``oracle_mla_problems``: random batches of a whole MLA layer (``MLAProblem``).
- ``oracle_errors``: distances between a result and its reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attn_select.testing.error_bounds import ErrorBound, error_bound
from attn_select.testing.oracle import (
    AttentionOptions,
    attention_options,
    attention_reference,
    merge_reference,
    varlen_reference,
    visible_keys,
)
from attn_select.testing.oracle_errors import RelativeError, lse_error, relative_error, same_bits
from attn_select.testing.oracle_mla import (
    absorb_query,
    mla_absorbed_reference,
    mla_reference,
    project_output,
    sparse_mla_reference,
)
from attn_select.testing.oracle_mla_problems import MLAProblem, random_mla_problem
from attn_select.testing.oracle_paged import (
    gather_reference,
    paged_reference,
    slot_mapping_reference,
    write_reference,
)
from attn_select.testing.oracle_problems import Problem, Request
from attn_select.testing.oracle_quant import pack_fp8_ds_mla, quantize_query, storage_dtype, unpack_fp8_ds_mla
from attn_select.testing.oracle_random import random_problem, random_requests

if TYPE_CHECKING:
    from attn_select.testing.conformance import BackendConformance as BackendConformance

__all__ = [
    "AttentionOptions",
    "ErrorBound",
    "MLAProblem",
    "Problem",
    "RelativeError",
    "Request",
    "absorb_query",
    "attention_options",
    "attention_reference",
    "error_bound",
    "gather_reference",
    "lse_error",
    "merge_reference",
    "mla_absorbed_reference",
    "mla_reference",
    "pack_fp8_ds_mla",
    "paged_reference",
    "project_output",
    "quantize_query",
    "random_mla_problem",
    "random_problem",
    "random_requests",
    "relative_error",
    "same_bits",
    "slot_mapping_reference",
    "sparse_mla_reference",
    "storage_dtype",
    "unpack_fp8_ds_mla",
    "varlen_reference",
    "visible_keys",
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
