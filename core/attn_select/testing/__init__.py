"""For authors of backends: the float64 oracle that results are compared with. Needs torch.

- ``oracle``: attention, its mask, and the merge of partials; the conventions are stated there.
- ``oracle_paged``: the same on a paged cache of any layout, writing the cache, slot mappings.
- ``oracle_mla``: multi-head latent attention, decompressed, absorbed and sparse.
- ``oracle_quant``: FP8 with scales, and the 656-byte token of sparse MLA.
- ``oracle_random``: random batches on poisoned memory (``oracle_problems.Problem``).
- ``oracle_errors``: distances between a result and its reference.
"""

from __future__ import annotations

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
from attn_select.testing.oracle_paged import (
    gather_reference,
    paged_reference,
    slot_mapping_reference,
    write_reference,
)
from attn_select.testing.oracle_problems import Problem, Request
from attn_select.testing.oracle_quant import pack_fp8_ds_mla, quantize_query, storage_dtype, unpack_fp8_ds_mla
from attn_select.testing.oracle_random import random_problem, random_requests

__all__ = [
    "AttentionOptions",
    "Problem",
    "RelativeError",
    "Request",
    "absorb_query",
    "attention_options",
    "attention_reference",
    "gather_reference",
    "lse_error",
    "merge_reference",
    "mla_absorbed_reference",
    "mla_reference",
    "pack_fp8_ds_mla",
    "paged_reference",
    "project_output",
    "quantize_query",
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
