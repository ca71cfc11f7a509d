"""Which program of a decode attends to which keys: requests cut into pieces, the longest first."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attn_select_triton.kernels import launch
from attn_select_triton.kernels.relaunch import Relaunches, dtypes

FIELDS = tl.constexpr(8)  # Numbers of a piece: the fields of ``Piece``, and one that fills 32 bytes
TOGETHER = tl.constexpr(32)  # Requests that a program lists


class Piece(NamedTuple):
    """One piece of a request's keys."""

    request: tl.tensor  # its number; -1: there is no such piece
    # split, splits: which of how many even shares
    split: tl.tensor
    splits: tl.tensor
    slot: tl.tensor  # of the first share's partial result, where there are several
    query_start: tl.tensor
    query_len: tl.tensor
    seq_len: tl.tensor


@triton.jit
def read_piece(pieces_ptr, index):
    """Return a ``Piece``."""
    pieces_ptr += index * FIELDS
    return Piece(
        tl.load(pieces_ptr), tl.load(pieces_ptr + 1), tl.load(pieces_ptr + 2), tl.load(pieces_ptr + 3),
        tl.load(pieces_ptr + 4), tl.load(pieces_ptr + 5), tl.load(pieces_ptr + 6),
    )  # fmt: skip


@triton.jit
def share_of(query_start_loc_ptr, seq_lens_ptr, request, split, splits):
    """Return a ``Piece`` without a list: one of ``splits`` shares of a request, in a batch where each has as many."""
    start = tl.load(query_start_loc_ptr + request)
    end = tl.load(query_start_loc_ptr + request + 1)
    return Piece(request, split, splits, request * splits, start, end - start, tl.load(seq_lens_ptr + request))


@triton.jit
def shares(query_start_loc_ptr, seq_lens_ptr, requests, count, split_tokens, most_splits, reach, tile_tokens):
    """Return of some requests query start and length, sequence length, shares, and keys of a share; without query 0."""
    there = requests < count
    start = tl.load(query_start_loc_ptr + requests, mask=there, other=0)
    query_len = tl.load(query_start_loc_ptr + requests + 1, mask=there, other=0) - start
    seq_len = tl.load(seq_lens_ptr + requests, mask=there, other=0)
    keys = seq_len
    if reach > 0:  # a program's tokens see the last one's window and, before it, one key more for each token
        keys = tl.minimum(seq_len, tl.minimum(query_len, tile_tokens) - 1 + reach)
    splits = tl.maximum(tl.minimum(tl.cdiv(keys, split_tokens), most_splits), 1)
    splits = tl.where(there & (query_len > 0), splits, 0)
    # The divisor is 1 where there are no shares, since those lanes divide too.
    return start, query_len, seq_len, splits, tl.cdiv(keys, tl.maximum(splits, 1))


@triton.jit
def write_piece(pieces_ptr, index, piece, there):
    """Write pieces at their places."""
    pieces_ptr += index * FIELDS
    for field in tl.static_range(7):
        tl.store(pieces_ptr + field, piece[field], mask=there)


@triton.jit(
    do_not_specialize=["count", "capacity", "merges", "split_tokens", "most_splits", "reach", "tile_tokens"],
    do_not_specialize_on_alignment=launch.SLICED,
)
def list_pieces_kernel(
    pieces_ptr, query_start_loc_ptr, seq_lens_ptr, count, capacity, merges, split_tokens, most_splits, reach,
    tile_tokens,
):  # fmt: skip
    """List the pieces of ``TOGETHER`` requests at their places among all, of which longer ones come first."""
    # Behind them stand the requests that have several, in their order.
    # Each program goes through all requests, to count those before its own: a place follows without a sort, a second
    # launch or a word between programs.
    index = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    start, query_len, seq_len, splits, size = shares(
        query_start_loc_ptr, seq_lens_ptr, index, count, split_tokens, most_splits, reach, tile_tokens
    )
    place = tl.zeros([TOGETHER], tl.int32)
    slot = tl.zeros([TOGETHER], tl.int32)
    merge = tl.zeros([TOGETHER], tl.int32)
    total = 0
    cut = 0
    for first in range(0, count, TOGETHER):
        other = first + tl.arange(0, TOGETHER)
        _, _, _, others, other_size = shares(
            query_start_loc_ptr, seq_lens_ptr, other, count, split_tokens, most_splits, reach, tile_tokens
        )
        before = other[None, :] < index[:, None]
        longer = other_size[None, :] > size[:, None]
        equal = other_size[None, :] == size[:, None]
        # Pieces are placed longest first, equal ones in the order of requests; slots and merges in that order alone.
        place += tl.sum(tl.where(longer | (equal & before), others[None, :], 0), 1)
        several = others > 1
        slot += tl.sum(tl.where(before & several[None, :], others[None, :], 0), 1)
        merge += tl.sum((before & several[None, :]).to(tl.int32), 1)
        total += tl.sum(others, 0)
        cut += tl.sum(several.to(tl.int32), 0)
    for split in range(0, tl.max(splits, 0)):
        # ``index * 0``: ``write_piece`` stores tensors, and a loop's number is none.
        piece = Piece(index, index * 0 + split, splits, slot, start, query_len, seq_len)
        write_piece(pieces_ptr, place + split, piece, (split < splits) & (place + split < capacity))
    piece = Piece(index, index * 0, splits, slot, start, query_len, seq_len)
    write_piece(pieces_ptr, capacity + merge, piece, (splits > 1) & (merge < merges))
    # All programs together mark what is left of both lists with request -1.
    own = tl.program_id(0) * TOGETHER
    step = tl.num_programs(0) * TOGETHER
    for first in range(total + own, capacity, step):
        rest = first + tl.arange(0, TOGETHER)
        tl.store(pieces_ptr + rest * FIELDS, rest * 0 - 1, mask=rest < capacity)
    for first in range(cut + own, merges, step):
        rest = first + tl.arange(0, TOGETHER)
        tl.store(pieces_ptr + (capacity + rest) * FIELDS, rest * 0 - 1, mask=rest < merges)


_list = Relaunches(list_pieces_kernel, num_warps=4)


def list_pieces(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    capacity: int,
    split_tokens: int,
    most_splits: int,
    reach: int = 0,
    tile_tokens: int = 1 << 30,
    merges: int = 0,
    pieces: Tensor | None = None,
) -> Tensor:
    """Return the pieces of a batch, int32 ``(capacity + merges, 8)``; nothing waits for the device.

    A request is cut into as many even shares as ``split_tokens`` asks for, by its own length alone.

    Args:
        query_start_loc: int32 ``(B + 1,)``; seq_lens int32 ``(B,)``. Requests without query tokens have no pieces.
        capacity: pieces at most; what is behind the last has request -1.
        split_tokens: keys that a share should have at least, from 1.
        most_splits: shares of a request at most.
        reach: keys before a token that it sees, itself included; 0: all.
        tile_tokens: tokens of a request whose rows one program has, which see ``reach`` keys and the tokens between.
        merges: requests that may be in several pieces. Behind all pieces stands the first piece of each such request,
            in the order of requests, then request -1.
        pieces: where to, for captured steps.
    """
    if pieces is None:
        pieces = torch.empty(capacity + merges, FIELDS.value, dtype=torch.int32, device=seq_lens.device)
    key = (seq_lens.get_device(), *dtypes(query_start_loc, seq_lens))
    _list(
        key, (max(1, -(-len(seq_lens) // TOGETHER.value)), 1, 1), pieces, query_start_loc, seq_lens, len(seq_lens),
        capacity, merges, max(1, split_tokens), most_splits, reach, tile_tokens,
    )  # fmt: skip
    return pieces
