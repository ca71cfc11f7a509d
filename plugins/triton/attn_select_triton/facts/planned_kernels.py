"""What the plans of the backends run, as data: ``BackendPlan.kernel``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PrefillKernel:
    """A prefill, by ``kernels.prefill`` unless something else is said.

    Attributes:
        warp_specialised: ``kernels.prefill_hopper`` runs the prefills for which it is the cheapest way.
        pages_by_tma: pages of the layer's block size hold whole tiles that TMA reads where they lie.
        gather_bytes: part of the plan's workspace that holds keys and values copied out of the cache; 0: none are.
        gathered_warps: ``kernels.prefill_hopper`` runs what was copied where that is cheaper; not part of the name,
            which stands for whatever kernel follows the copy.
    """

    warp_specialised: bool = False
    pages_by_tma: bool = False
    gather_bytes: int = 0
    gathered_warps: bool = False

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        parts = ["triton-prefill"]
        if self.warp_specialised:
            parts.append("warp-specialised")
        if self.pages_by_tma:
            parts.append("tma")
        elif self.gather_bytes:
            parts.append("gather")
        return "-".join(parts)


@dataclass(frozen=True, slots=True)
class DecodeKernel:
    """``TRITON_ATTN``'s decode, ``kernels.decode``.

    Attributes:
        fixed_splits: splits have a fixed number of keys (batch invariance); else every SM gets its share of the keys.
    """

    fixed_splits: bool = False

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return "triton-decode-fixed-splits" if self.fixed_splits else "triton-decode"


@dataclass(frozen=True, slots=True)
class MLADecodeKernel:
    """``TRITON_MLA``'s decode.

    Attributes:
        gluon: ``kernels.mla_decode_hopper``, written in Gluon for Hopper; else ``kernels.mla_decode``.
        fixed_splits: as ``DecodeKernel`` has it.
        fp8_query: with ``gluon``, ``kernels.mla_decode_hopper_fp8`` runs, which rounds the query to e4m3.
    """

    gluon: bool = False
    fixed_splits: bool = False
    fp8_query: bool = False

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        name = "gluon-mla-decode" if self.gluon else "triton-mla-decode"
        if self.fp8_query:
            name += "-fp8"
        return f"{name}-fixed-splits" if self.fixed_splits else name


@dataclass(frozen=True, slots=True)
class MLASparseKernel:
    """``TRITON_MLA_SPARSE``'s kernel, in both phases but for what prefills copy.

    Attributes:
        gluon: ``kernels.mla_decode_gathered``, written in Gluon for Hopper; else ``kernels.mla_decode``.
        gather_bytes: of the workspace, for latents that prefills copy as the Gluon kernel takes them; 0: none are.
    """

    gluon: bool = False
    gather_bytes: int = 0

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return "gluon-mla-sparse" if self.gluon else "triton-mla-sparse"


Version = Literal["v1", "v2"]


@dataclass(frozen=True, slots=True)
class ClassicDecodeKernel:
    """``PAGED_ATTENTION``'s decode, ``kernels.paged_attention``: each batch runs version 1 or 2.

    Attributes:
        partition_size: tokens that one program of version 2 reads.
        v1_most_tokens: version 1 runs no batch with a longer sequence.
        v1_least_rows: above one partition, version 1 needs more than this many sequences x query heads.
        partials_bytes: the most that the partial results of version 2 may take, unless one sequence alone takes more.
    """

    partition_size: int
    v1_most_tokens: int
    v1_least_rows: int
    partials_bytes: int

    @property
    def name(self) -> str:
        """The kernel's stable name: measured times belong to it."""
        return "paged-attention"

    def version(self, num_seqs: int, num_heads: int, max_seq_len: int) -> Version:
        """Return the version that decodes a batch.

        Args:
            num_seqs: sequences, one query token each.
            num_heads: query heads.
            max_seq_len: tokens of the longest sequence.
        """
        one_partition = max_seq_len <= self.partition_size
        short_enough = max_seq_len <= self.v1_most_tokens
        return "v1" if short_enough and (one_partition or num_seqs * num_heads > self.v1_least_rows) else "v2"
