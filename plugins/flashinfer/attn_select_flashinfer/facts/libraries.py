"""What the facts of FlashInfer's backends share: the libraries, the releases that matter, sources and sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attn_select.backends.reasons import block_size_reason
from attn_select.backends.spec import Fact, Library, Reason
from attn_select.machine.environment import Environment, version_matches

RAN = "ran on H100, flashinfer 0.6.14, 2026-11-21"
DECODE = "flashinfer-ai/flashinfer flashinfer/decode.py 0.6.14"
PREFILL = "flashinfer-ai/flashinfer flashinfer/prefill.py 0.6.14"
LAUNCHER = "flashinfer-ai/flashinfer csrc/trtllm_fmha_kernel_launcher.cu v0.6.14"
JIT_ATTENTION = "flashinfer-ai/flashinfer flashinfer/jit/attention/modules.py 0.6.14"
MLA_CORE = "flashinfer-ai/flashinfer flashinfer/mla/_core.py 0.6.14"
VLLM = "vllm-project/vllm v1/attention/backends/flashinfer.py 0.33.0"

TORCH = Library("torch", "torch", "pip install torch numpy")
# 0.6.14 is the release that these facts were read in and run with; its MLA entry is the first with kv_scale_format,
# cum_seq_lens_q, ckv_scale and kpe_scale.
FLASHINFER_PYTHON = Library("flashinfer-python", "flashinfer", "pip install --upgrade flashinfer-python", ">=0.6.14")
LIBRARIES = ((TORCH,), (FLASHINFER_PYTHON,))
READ = "pip install 'flashinfer-python>=0.7.2,<=0.7.2.post1'"
"""Brings the newest release whose entries were compared with what this plugin passes."""

# What each entry takes was compared in 0.6.14 and in 0.7.2.post1 (``tests/make_signatures.py``).
NATIVE_MLA_RELEASES = Fact(
    ">=0.6.14,!=0.7.0,!=0.7.0.post1,!=0.7.1",
    "flashinfer-ai/flashinfer 0.6.14 and 0.7.2.post1 BatchMLAPagedAttentionWrapper (flat lists before 0.7, "
    "MLAPlanMetadata since); 0.7.0 to 0.7.1, whose plans were written anew for 0.7.2, were not looked into",
)

Release = tuple[int, ...]

# What later releases added or repaired. An unknown version counts as the newest: it is what the install command brings.
NEWEST: Release = (0, 7, 2)
HEAD_512_BELOW_SM100: Fact[Release] = Fact(
    (0, 6, 15), "flashinfer-ai/flashinfer #3739: head size 512 with 16-bit KV on 8.x and 9.x"
)
HEAD_512_FP8_BELOW_SM100: Fact[Release] = Fact(
    (0, 7, 2), "flashinfer-ai/flashinfer flashinfer/jit/attention/modules.py 0.7.2.post1"
)
FP8_WINDOW_FA3: Fact[Release] = Fact(
    (0, 6, 15), "flashinfer-ai/flashinfer #3682: before, FP8 fa3 prefill with a window hangs (#3578)"
)
TURING: Fact[Release] = Fact(
    (0, 6, 16),
    "flashinfer-ai/flashinfer #3620: before, prefill asks for more shared memory than 7.5 has; vllm-project/vllm "
    "#55380 (0.6.16 on RTX 2080 Ti, 16-bit and FP8 caches, float16) and #47549",
)
XQA_DRAFT_WINDOW: Fact[Release] = Fact(
    (0, 6, 16), f"flashinfer-ai/flashinfer #4137: one window per draft token; {RAN}: relative error 0.85 without"
)
XQA_DRAFT_MASK_FP8: Fact[Release] = Fact(
    (0, 6, 16),
    f"flashinfer-ai/flashinfer #4199: full draft mask with FP8 KV on 9.x; {RAN}: relative error 0.22 without",
)

GEN_DRAFTS: Fact[Release] = Fact(
    (0, 6, 18),
    "flashinfer-ai/flashinfer #4382 (SM100, SM103): before, decodes of 5 tokens and more per request read and write "
    "the rows of other requests, where a batch has several",
)
GEN_DRAFTS_RIGHT = 4
"""Tokens per request up to which trtllm-gen decodes rightly before ``GEN_DRAFTS`` (#4382's own control)."""
GDN_STATE_WRONG: Fact[Release] = Fact(
    (0, 6, 17),
    "flashinfer-ai/flashinfer #4311: #4133, first in 0.6.17, updates states with another token's decay on SM100; "
    "repaired in 0.6.18",
)
FINITE_MASK: Fact[Release] = Fact(
    (0, 7, 0),
    "flashinfer-ai/flashinfer #4401 (#4267, #4450): before, fa2 masks by -5e4, so that a row gives zeros where all its "
    "products of query and key are below that",
)
ONE_CACHE_DTYPE = Fact(
    False,
    "flashinfer include/flashinfer/attention v0.6.14: prefill.cuh, mla.cuh and hopper/kernel_traits.cuh give 16-bit "
    "keys unconverted to an MMA of the query's dtype",
)
CONVERTED = "the kernel writes bfloat16, which is converted to float16"

MIB = 1 << 20
INT_WORKSPACE = 8 * MIB
"""Device bytes that every native wrapper allocates for its schedule (decode.py, prefill.py, mla/_core.py 0.6.14)."""

TRTLLM_GEN_CAPABILITIES = ((10, 0), (10, 3))
"""Compute capabilities with trtllm-gen kernels (include/flashinfer/trtllm/fmha/fmhaRunner.cuh v0.6.14)."""


def release(environment: Environment) -> Release:
    """Return the release of flashinfer-python, the newest one looked into where the version is unknown."""
    version = environment.version("flashinfer-python")
    found = None if version is None else re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else NEWEST


def wrong_release(environment: Environment, path: str, accepted: Fact[str]) -> list[Reason]:
    """Return the reason against a release that is outside the range of one kernel's entry; an unknown one is inside."""
    version = environment.version("flashinfer-python")
    if version is None or version_matches(version, accepted.value):
        return []
    message = f"flashinfer-python {version} (needed by {path}: {accepted.value})"
    return [Reason("library-version", message, version, accepted.value, READ)]


def text_of(needed: Fact[Release]) -> str:
    """Return ``0.6.16``."""
    return ".".join(map(str, needed.value))


def upgrade(needed: Fact[Release]) -> str:
    """Return the command that brings ``needed`` or newer."""
    return f"pip install 'flashinfer-python>={text_of(needed)}'"


def pages(sizes: tuple[int, ...], block_size: int | None) -> tuple[int, ...]:
    """Return ``sizes`` (tokens), preferred first; of an allocator's block size its divisors, largest first."""
    if block_size is None:
        return sizes
    return tuple(sorted((size for size in sizes if block_size % size == 0), reverse=True))


def page_reasons(sizes: tuple[int, ...], block_size: int | None) -> list[Reason]:
    """Return the reason against an allocator's block size that no page of a kernel divides."""
    return [] if pages(sizes, block_size) or block_size is None else [block_size_reason(block_size, sizes)]


def merge_refusals(refused: Sequence[Sequence[Reason]]) -> list[Reason]:
    """Return what to say when every kernel refused: one reason per code, each kernel's own."""
    # A kernel whose codes include another kernel's and more is left out: removing the other's reasons would be enough.
    codes = [{reason.code for reason in reasons} for reasons in refused]
    merged: dict[str, Reason] = {}
    for reasons, own in zip(refused, codes, strict=True):
        if not any(other < own for other in codes):
            for reason in reasons:
                merged.setdefault(reason.code, reason)
    return list(merged.values())


def padded_heads(heads: int) -> int:
    """Return the query heads that FlashInfer's Blackwell MLA kernels work on for ``heads`` (1 to 128)."""
    # They are 8, 16, 32, 64 or 128. trtllm-gen takes whole groups of 8, 16 or 64 heads
    # (include/flashinfer/trtllm/fmha/fmhaKernels.cuh v0.6.14; others came with 0.6.17, flashinfer-ai/flashinfer #4178;
    # 0.7.2 refuses 65 to 127 in mla/_core.py); for sparse MLA on 12.x see csrc/sparse_mla_sm120_prefill.cu v0.6.14.
    return next(tile for tile in (8, 16, 32, 64, 128) if heads <= tile)
