"""``TRITON_ATTN``'s metadata: a step's launches, prepared once for all layers of a kind.

In steps that are captured nothing may follow from lengths that replays change: uniform batches decode by a list of
pieces that each replay's ``build`` writes to the same place, and mixed ones are one launch over the pages.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select.runtime.backend import AttentionMetadataBuilder, BackendContext
from attn_select.runtime.batch import to_device
from attn_select.runtime.cascade import split_for_cascade
from attn_select.runtime.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from attn_select.runtime.torch_dtypes import FP8_DTYPES, PLAIN_DTYPES, storage_dtype
from attn_select_triton import tuning
from attn_select_triton.facts.planned_kernels import PrefillKernel
from attn_select_triton.facts.triton_attn import TMA_PAGE, in_boxes
from attn_select_triton.kernels.cache import GATHER_ALIGN
from attn_select_triton.kernels.decode import Decode, Shape
from attn_select_triton.kernels.launch import Launch, capability_of, decode_launch, gpu_of, hopper_prefill_launch
from attn_select_triton.kernels.pieces import FIELDS, list_pieces
from attn_select_triton.kernels.prefill import Prefill
from attn_select_triton.kernels.work_list import WorkList, list_work
from attn_select_triton.limits import GLUON_CAPABILITY, power_of_two
from attn_select_triton.runtime import schedule
from attn_select_triton.runtime.side_stream import SideStream
from attn_select_triton.tuning import Cost, Way, way_cost

# Bytes of keys and values that a cascade must spare from being read again. On an H100 (bfloat16, 32 and 8 heads of 128)
# it lost 13 to 14 % at 112 to 126 MiB, won 9 to 12 % at 224 to 240 MiB with 8 and 16 decodes but lost 8 % at 252 MiB
# with 64, and won 13 to 24 % at 504 MiB.
LEAST_SAVED = 256 << 20

# By what share the keys of a decode may change until it is cut anew: working that out takes half of a step's build.
CHANGED = 1 / 16


@dataclass(frozen=True, slots=True)
class Cut:
    """How the keys of a decode are cut, and for which."""

    of: tuple[Any, ...]  # requests, and the arguments of ``schedule.split_keys`` beside the lengths
    keys: int  # of all requests
    longest: int
    splits: int  # pieces of the longest
    each: int  # keys of a piece
    most: int  # pieces that there is room for

    def serves(self, of: tuple[Any, ...], keys: int, longest: int) -> bool:
        """Whether it is still good enough for lengths, and its pieces of them have room."""
        if of != self.of or of[0] + keys // self.each > self.most:
            return False
        return abs(keys - self.keys) <= CHANGED * self.keys and abs(longest - self.longest) <= CHANGED * self.longest


@dataclass(slots=True)
class Gather:
    """Keys and values copied out of their pages before a prefill."""

    heads: int  # KV heads that are copied at a time
    whole: tuple[Tensor, Tensor]  # where to, ``(tokens, heads, size)``, rows padded to powers of two
    rows: tuple[Tensor, Tensor]  # the same without the padding
    arguments: dict[str, Any]  # of ``gather_pages``


@dataclass(slots=True)
class Part:
    """Requests that one launch serves, by the decode kernel or else the prefill's."""

    causal: bool
    ranges: Tensor | None = None
    decode: Decode | None = None  # the prepared decode
    gather: Gather | None = None  # what comes before a prefill
    prefill: dict[str, Any] = field(default_factory=dict)  # arguments of ``Prefill``
    warps: bool = False  # the prefill's kernel is ``prefill_hopper``, where it can read this cache
    # arguments of it alone: its counter, and by what programs share a row's keys
    own: dict[str, Any] = field(default_factory=dict)
    # the prefill's launch by ``prefill_hopper`` and by ``prefill``, once a layer ran by it
    prepared: Any = None
    plain: Prefill | None = None


@dataclass(slots=True)
class TritonAttnMetadata:
    """One step for all layers of a kind."""

    num_actual_tokens: int  # T
    parts: list[Part]  # the launches; with a prefix, for the rest of each request
    # the launches for a prefix that all requests share, which is one request of T queries
    prefix: list[Part] | None = None
    beside: SideStream | None = None  # where the first part, decodes, runs beside the others


def planned_prefill(context: BackendContext) -> PrefillKernel:
    """Return the kernel of the plan for prefills; the plainest one where another backend serves them."""
    kernel = context.plans["prefill"].kernel if "prefill" in context.plans else PrefillKernel()
    assert isinstance(kernel, PrefillKernel)
    return kernel


def check_gluon(device: torch.device) -> None:
    """Check that the Gluon kernel of a plan is one for this device; else KernelMismatchError."""
    capability = capability_of(device)
    if capability != GLUON_CAPABILITY:
        raise KernelMismatchError(
            f"the plan's warp-specialised prefill runs on compute capability 9.0; {device} has "
            f"{'.'.join(map(str, capability))}",
            hint="select on the machine that runs the layers",
        )


def room_for_copies(context: BackendContext, num_bytes: int) -> tuple[Tensor, Tensor] | None:
    """Return memory for K and V ``(rows, num_kv_heads, size)``, rows padded to powers of two, that are copied out of
    the cache: ``num_bytes`` for both or what the largest batch takes; None: there is none."""
    config, dtype = context.config, PLAIN_DTYPES[context.config.dtype]
    widths = power_of_two(config.head_size), power_of_two(config.value_head_size)
    longest = -(-context.max_model_len // GATHER_ALIGN) * GATHER_ALIGN
    row = config.num_kv_heads * sum(widths) * dtype.itemsize
    rows = min(num_bytes // row // GATHER_ALIGN * GATHER_ALIGN, context.max_num_seqs * longest)
    if not rows:
        return None
    key, value = (torch.empty(rows, config.num_kv_heads, width, dtype=dtype, device=context.device) for width in widths)
    return key, value


class TritonAttnBuilder(AttentionMetadataBuilder[TritonAttnMetadata]):
    """Builds the metadata of one kind of layers; reserves the workspaces of its plans."""

    takes_length_bounds = True
    least_cascade_bytes = LEAST_SAVED

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        config, device = context.config, context.device
        self.shape = Shape(
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            config.value_head_size,
            PLAIN_DTYPES[config.dtype],
            storage_dtype(config.cache_dtype) if config.has_cache else PLAIN_DTYPES[config.dtype],
            device,
        )
        self._group = config.num_heads // config.num_kv_heads
        self._causal = config.attn_type == "decoder" and not config.non_causal
        self._window = config.sliding_window or 0
        self._fp8, self._gpu = config.cache_dtype in FP8_DTYPES, gpu_of(device)
        self._row = config.num_heads * (config.value_head_size + 1)
        self._key_bytes = (config.head_size + config.value_head_size) * self.shape.cache_dtype.itemsize
        self._workspace: Tensor | None = None
        self._arrived: Tensor | None = None
        self._gathered: tuple[Tensor, Tensor] | None = None
        self._ways: dict[Way, Cost] = {}
        self._pieces: Tensor | None = None
        self._counter: Tensor | None = None
        self._tile_rows = 0
        self._fixed_split = 0
        self._last_cut: Cut | None = None
        if not config.has_cache:
            return
        self.reorder_batch_threshold = config.max_decode_query_len
        self._reserve()
        if context.cuda_graphs:
            self._reserve_pieces()

    def _reserve(self) -> None:
        """Allocate the plans' workspaces: partial results of splits, and what is gathered."""
        context = self.context
        config, device = context.config, context.device
        prefill = planned_prefill(context)
        whole_pages = (context.block_size or 1) % TMA_PAGE == 0
        by_tma = prefill.pages_by_tma or (prefill.warp_specialised and whole_pages)
        self._ways["pages"] = way_cost("tma_pages" if by_tma else "pages")
        self._ways["split"] = way_cost("split_fp8" if self._fp8 else "split")
        if (prefill.warp_specialised or prefill.gathered_warps) and device.type == "cuda":
            check_gluon(device)
            self._counter = torch.zeros(2, dtype=torch.int32, device=device)
            tile = hopper_prefill_launch(config.head_size, config.value_head_size)
            assert tile is not None
            self._tile_rows = tile.block_m
        if prefill.warp_specialised and device.type == "cuda":
            self._ways["warps"] = way_cost("warps")
        reserved = prefill.gather_bytes
        split_bytes = {phase: plan.workspace_bytes for phase, plan in context.plans.items()}
        if "prefill" in split_bytes:
            split_bytes["prefill"] -= reserved
        room = max(split_bytes.values()) // 4
        if config.batch_invariant:
            self._fixed_split = schedule.fixed_split(self._most_keys)
            room = context.max_num_seqs * self._longest_decode * self._row * self._fixed_pieces
        self._workspace = torch.empty(room, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(room // (config.value_head_size + 1), dtype=torch.int32, device=device)
        self._gathered = room_for_copies(context, reserved)
        if self._gathered is not None:
            if in_boxes(config.head_size, config.value_head_size):
                self._ways["gathered"] = way_cost("gathered")
            if prefill.gathered_warps and device.type == "cuda":
                self._ways["gathered_warps"] = way_cost("gathered_warps")

    def _reserve_pieces(self) -> None:
        """Allocate the list of pieces that captured decodes read."""
        most = self._capacity(self.context.max_num_seqs, self.shape.kv_heads) + tuning.decode_splits().apart
        self._pieces = torch.empty(most, FIELDS.value, dtype=torch.int32, device=self.context.device)

    @property
    def _fixed_pieces(self) -> int:
        """Pieces of the longest request, where a piece has a fixed size."""
        return -(-self._most_keys // self._fixed_split)

    def _capacity(self, requests: int, units: int) -> int:
        """Return how many pieces so many decodes may have at most, with ``units`` programs each."""
        if self._fixed_split:
            return requests * self._fixed_pieces
        return requests + schedule.most_pieces(units, self._gpu)

    @property
    def _longest_decode(self) -> int:
        return self.context.config.max_decode_query_len

    @property
    def _most_keys(self) -> int:
        """The most keys that a decode can see."""
        return self._visible(self._longest_decode, self.context.max_model_len)

    def _visible(self, query_len: int, seq_len: int) -> int:
        """Return how many keys the rows of a request see together, at most."""
        if not self._window:
            return seq_len
        return min(seq_len, query_len - 1 + self._window * (1 if self._causal else 2))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> TritonAttnMetadata:
        common, prefix = common_attn_metadata, None
        if common_prefix_len:
            assert self.context.block_size is not None
            halves = split_for_cascade(common, common_prefix_len, self.context.block_size)
            prefix, common = self._prefills(halves.prefix, 0), halves.suffix
        parts = self._parts(common)
        beside = SideStream(self.context.device) if prefix is None and self._beside(common, parts) else None
        return TritonAttnMetadata(common.num_actual_tokens, parts, prefix, beside)

    def _beside(self, common: CommonAttentionMetadata, parts: list[Part]) -> bool:
        """Whether a step's decodes run beside its prefills: where both take long, and only one uses the workspace."""
        if len(parts) < 2 or self.context.device.type != "cuda" or parts[0].decode is None:
            return False
        if any(part.decode is not None or "workspace" in part.own for part in parts[1:]):
            return False  # both streams would write their partial results to the same place
        decodes = len(parts[0].decode.seq_lens)
        tokens = common.num_actual_tokens - int(common.query_start_loc_cpu[decodes])
        keys = int(common.seq_lens_cpu[:decodes].sum())
        return schedule.worth_two_streams(tokens, keys * self.shape.kv_heads * self._key_bytes)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> TritonAttnMetadata:
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        query_len, tokens = common.max_query_len, common.num_actual_tokens
        if self.context.kv_layout is not None and query_len <= self._longest_decode and tokens == requests * query_len:
            parts = [self._decodes(common, requests)]
        else:  # each replay brings its own requests for these tokens
            parts = [self._prefill(common, 0, requests)]
        return TritonAttnMetadata(tokens, parts)

    def _parts(self, common: CommonAttentionMetadata) -> list[Part]:
        if self.context.kv_layout is None:
            return [self._prefill(common, 0, common.num_reqs)] if common.num_actual_tokens else []
        bounds = common.query_start_loc_cpu
        if common.max_query_len > self._longest_decode and int(bounds[-1]) == int(bounds[-2]):
            # A mixed batch's padding stands behind its prefills, where it would count as decodes.
            filled = (bounds.diff() > 0).nonzero()
            common = common.requests(0, int(filled[-1]) + 1 if len(filled) else 1)
        split = split_decodes_and_prefills(common, self._longest_decode)
        if split.num_prefill_tokens and self._joined(common, split.num_decode_tokens > 0):
            return [self._splitting(common, 0, common.num_reqs, common.max_query_len)]
        parts = []
        if split.num_decode_tokens:
            parts.append(self._decodes(common, split.num_decodes))
        if split.num_prefill_tokens:
            parts += self._prefills(common, split.num_decodes)
        return parts

    def _joined(self, common: CommonAttentionMetadata, decodes: bool) -> bool:
        """Whether one launch of the decode kernel serves a step with prefills."""
        if self._fixed_split or common.tree_mask is not None:
            return False
        launch = self._launch(common.num_reqs, common.max_query_len)
        seen = self._visible(self._tile_tokens(launch, common.max_query_len), common.max_seq_len)
        width = max(self.shape.head_size, self.shape.value_size)
        if not schedule.few_keys(seen, width, decodes):
            return False
        tiles = -(-common.query_lens_cpu.numpy() * self._group // launch.block_m)
        return schedule.few_programs(int(tiles.sum()) * self.shape.kv_heads, self._gpu)

    # Decodes

    def _decodes(self, common: CommonAttentionMetadata, count: int) -> Part:
        """Return the launch of the first ``count`` requests."""
        query_len = common.max_query_len if count == common.num_reqs else int(common.query_lens_cpu[:count].max())
        if self._fixed_split:
            query_len = self._longest_decode
        return self._splitting(common, 0, count, query_len, self._pieces, common.tree_mask)

    def _splitting(
        self,
        common: CommonAttentionMetadata,
        first: int,
        last: int,
        query_len: int,
        captured: Tensor | None = None,
        tree_mask: Tensor | None = None,
    ) -> Part:
        """Return the launch of the decode kernel for requests ``first .. last - 1``."""
        # query_len: of the longest.
        # captured: where the pieces are to be, for captured steps.
        # tree_mask: of the step, where its drafts form trees.
        assert self._workspace is not None
        launch, requests = self._launch(last - first, query_len), last - first
        units = self.shape.kv_heads * -(-self._group * query_len // launch.block_m)
        room = self._workspace.numel() // (query_len * self._row)
        lens = common.seq_lens_cpu.numpy()[first:last]
        tile_tokens, longest = self._tile_tokens(launch, query_len), int(lens.max())
        # With a window only what a program's rows see counts as keys.
        seen = self._visible(tile_tokens, longest)
        if seen < longest:
            lens, longest = np.minimum(lens, seen), seen
        keys = int(lens.sum())
        # Where few programs have many pieces each, merging by the last of them would take longer than a launch.
        merges = requests if requests * units <= tuning.decode_splits().apart and not self._fixed_split else 0
        if self._fixed_split:
            splits, each = self._fixed_pieces, self._fixed_split
        else:
            rows = min(launch.block_m, self._group * query_len)
            splits, each = self._cut(lens, keys, longest, (requests, units, room, launch, rows, merges > 0))
        bounds, seq_lens, table = self._requests(common, first, last)
        assert table is not None
        parted: dict[str, Any] = {}
        if splits > 1 or (captured is not None and not self._fixed_split):
            # The same at capture and replay: the bound follows from padded sizes.
            capacity = min(requests * splits, requests + keys // each)
            if captured is not None:
                capacity = self._capacity(requests, units)
                captured = captured[: capacity + merges]
            parted = {
                "pieces": list_pieces(
                    bounds,
                    seq_lens,
                    capacity=capacity,
                    split_tokens=each,
                    most_splits=splits,
                    reach=self._window * (1 if self._causal else 2),
                    tile_tokens=tile_tokens,
                    merges=merges,
                    pieces=captured,
                ),
                "slots": min(room, requests * splits if captured is None else capacity),
                "workspace": self._workspace,
                "arrived": None if merges else self._arrived,
                "merges": merges,
            }
        decode = Decode(
            self.shape,
            query_start_loc=bounds,
            seq_lens=seq_lens,
            block_table=table,
            max_query_len=query_len,
            tree_mask=tree_mask,
            launch=launch,
            **parted,
        )
        return Part(self._causal and common.causal, self._ranges(common, first, last), decode)

    def _cut(self, lens: schedule.Lens, keys: int, longest: int, of: tuple[Any, ...]) -> tuple[int, int]:
        """Return what ``schedule.split_keys`` does, or did for nearly these lengths in the step before."""
        # keys: the sum of the lengths.
        last = self._last_cut
        if last is not None and last.serves(of, keys, longest):
            # Pieces grow, and not their number: else equal requests, each a key longer, would have one more each.
            return last.splits, max(last.each, -(-longest // last.splits))
        _, units, room, launch, rows, apart = of
        lens = np.maximum(lens, 1, dtype=np.int64)
        splits, each = schedule.split_keys(
            lens, units=units, room=room, gpu=self._gpu, launch=launch, key_bytes=self._key_bytes, rows=rows,
            apart=apart,
        )  # fmt: skip
        most = min(room, self._capacity(len(lens), units))
        self._last_cut = Cut(of, keys, longest, splits, each, most)
        return splits, each

    def _tile_tokens(self, launch: Launch, query_len: int) -> int:
        """Return how many tokens of a request one program has rows of, at most."""
        # One more than fit: the first row may stand amid a token's heads.
        return min(query_len, -(-launch.block_m // self._group) + 1)

    def _launch(self, requests: int, query_len: int) -> Launch:
        shape = self.shape
        # Batch-invariant decodes launch as if they were alone, with the longest query that a decode has.
        load = 0.0 if self._fixed_split else requests * shape.kv_heads / self._gpu.sms
        width = max(shape.head_size, shape.value_size)
        rows = self._group * query_len
        return decode_launch(capability_of(shape.device), rows, width, shape.dtype, shape.cache_dtype, load)

    # Prefills

    def _prefills(self, common: CommonAttentionMetadata, first: int) -> list[Part]:
        """Return the launches of the requests from ``first`` on."""
        last = common.num_reqs
        if self._fixed_split:
            return [self._prefill(common, first, last)]
        query_lens = common.query_lens_cpu[first:].tolist()
        seq_lens = common.seq_lens_cpu[first:].tolist()
        # An image may begin before the window.
        window = 0 if self._ranges(common, first, last) is not None else self._window
        causal, heads = self._causal and common.causal, (self.shape.heads, self.shape.kv_heads)
        work = schedule.prefill_work(query_lens, seq_lens, heads=heads, causal=causal, window=window)
        shares = self._shares(work)
        heads_of_copy, room = self._copied(query_lens, seq_lens, window)
        copies = self.shape.kv_heads // heads_of_copy * -(-int(work.keys) // room)
        way = schedule.prefill_way(self._ways, work, shares, self._gpu, copies)
        if way == "split":
            return [self._splitting(common, first, last, max(query_lens))]
        if way not in ("gathered", "gathered_warps") or self._gathered is None:
            return [self._prefill(common, first, last, shares=shares.counts if shares and way == "warps" else None)]
        return self._gathering(common, first, work, window, way == "gathered_warps")

    def _copied(self, query_lens: list[int], seq_lens: list[int], window: int) -> tuple[int, int]:
        """Return how many KV heads are copied at a time, and the tokens that there is room for."""
        # All, or so many as there is room for with the longest request.
        heads, rows = self.shape.kv_heads, 1 if self._gathered is None else len(self._gathered[0])
        every, longest = heads * rows, schedule.copied_rows(query_lens, seq_lens, window)
        while heads > 1 and longest > every // heads:
            heads = max(fewer for fewer in range(1, heads) if self.shape.kv_heads % fewer == 0)
        return heads, every // heads

    def _shares(self, work: schedule.PrefillWork) -> schedule.Shares | None:
        """Return how the warp-specialised kernel cuts requests; None: it is none of the plan's."""
        if not self._tile_rows:
            return None
        return schedule.prefill_shares(way_cost("warps"), work, self._gpu, self._partials)

    def _gathering(
        self, common: CommonAttentionMetadata, first: int, work: schedule.PrefillWork, window: int, warps: bool
    ) -> list[Part]:
        """Return the launches of the requests from ``first`` on, and of the copies before them."""
        assert self._gathered is not None
        lens, query_lens = common.seq_lens_cpu[first:].tolist(), work.query_lens.tolist()
        heads, room = self._copied(query_lens, lens, window)
        shares = self._shares(replace(work, heads=(heads * self._group, heads))) if warps else None
        chunks = schedule.gathered_chunks(query_lens, lens, window, room)
        starts = to_device(
            torch.tensor([start for chunk in chunks for start in chunk.starts or [0]], dtype=torch.int32),
            self.context.device,
        )
        whole = tuple(copies.view(-1, heads, copies.shape[2])[:room] for copies in self._gathered)
        key, value = whole
        views = (key[..., : self.shape.head_size], value[..., : self.shape.value_size])
        parts = []
        for chunk in chunks:
            begin, end = first + chunk.first, first + chunk.last
            if chunk.starts is None:  # longer than what can be copied even of one head
                parts.append(self._prefill(common, begin, end, chunk.tokens))
                continue
            own = None if shares is None else shares.counts[chunk.first : chunk.last]
            part = self._prefill(common, begin, end, chunk.tokens, shares=own, heads=heads)
            key_start_loc = starts[chunk.first : chunk.last]
            of_requests = {name: part.prefill[name] for name in ("query_start_loc", "seq_lens")}
            table = part.prefill.pop("block_table")
            part.prefill["key_start_loc"] = key_start_loc
            copy = {"block_table": table, "key_start_loc": key_start_loc, "max_keys": chunk.most_rows, "window": window}
            part.gather = Gather(heads, (key, value), views, copy | of_requests)
            parts.append(part)
        return parts

    @property
    def _partials(self) -> int:
        """Rows of partial results that the workspace holds."""
        return 0 if self._workspace is None else self._workspace.numel() // (self.shape.value_size + 1)

    def _prefill(
        self,
        common: CommonAttentionMetadata,
        first: int,
        last: int,
        tokens: int | None = None,
        *,
        shares: schedule.Lens | None = None,
        heads: int = 0,
    ) -> Part:
        """Return the launch of requests ``first .. last - 1`` over pages, or over the step's own keys."""
        # shares: of their keys, by the warp-specialised kernel; None: by the plain one.
        # heads: KV heads of a launch; 0: all.
        bounds, seq_lens, table = self._requests(common, first, last)
        if tokens is None:
            tokens = common.num_actual_tokens - (int(common.query_start_loc_cpu[first]) if first else 0)
        longest = common.max_query_len if table is None else common.max_seq_len
        prefill: dict[str, Any] = {
            "query_start_loc": bounds,
            "seq_lens": seq_lens,
            "num_tokens": tokens,
            # Tiles are chosen by it: batch-invariant ones may not depend on the step.
            "max_seq_len": self.context.max_model_len if self.context.config.batch_invariant else longest,
        }
        if table is None:
            prefill["key_start_loc"] = bounds[:-1]
        else:
            prefill["block_table"] = table
        part = Part(self._causal and common.causal, self._ranges(common, first, last), prefill=prefill)
        if shares is not None:
            part.warps = True
            part.own = {"counter": self._counter, "work": self._listed(common, first, last, shares, heads)}
            if part.own["work"].partials:
                part.own["workspace"] = self._workspace
        return part

    def _listed(
        self, common: CommonAttentionMetadata, first: int, last: int, shares: schedule.Lens, heads: int
    ) -> WorkList:  # fmt: skip
        """Return what the programs of the warp-specialised prefill work on."""
        lens, heads = common.query_lens_cpu[first:last].numpy(), heads or self.shape.kv_heads
        return list_work(
            lens,
            shares,
            heads=(heads * self._group, heads),
            tile_rows=self._tile_rows,
            device=self.shape.device,
            # By the keys of one share, negated for the longest first.
            longest_first=np.argsort(common.seq_lens_cpu[first:last].numpy() / -shares, kind="stable"),
        )

    def _requests(self, common: CommonAttentionMetadata, first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return query bounds, lengths and block table of requests ``first .. last - 1``, views of the step's."""
        bounds, seq_lens, table = common.query_start_loc, common.seq_lens, common.block_table_tensor
        if first == 0 and last == common.num_reqs:
            return bounds, seq_lens, table
        return bounds[first : last + 1], seq_lens[first:last], None if table is None else table[first:last]

    def _ranges(self, common: CommonAttentionMetadata, first: int, last: int) -> Tensor | None:
        """Return the image ranges of requests ``first .. last - 1``, int32 ``(B, R, 2)``; None without any."""
        found = schedule.image_ranges(common, first, last)
        if found is None:
            return None
        host = torch.tensor(found, dtype=torch.int32).view(last - first, -1, 2)
        return to_device(host, self.context.device)
