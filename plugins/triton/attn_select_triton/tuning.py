"""What the launches choose by: ``tuning.toml``'s tiles, and its small model of splits and of ways to run a prefill.

A GPU counts by its multiprocessors, the shared memory of a block, and its bandwidth. Where it has less bandwidth for
each multiprocessor than the H100 of the fit, fewer programs fill it, and keys that are read for themselves alone
take longer.
"""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from attn_select_triton.limits import MEASURED_CAPABILITY

Way = Literal["pages", "gathered", "split", "warps", "gathered_warps"]
Kernel = Literal[
    "prefill", "prefill_hopper", "decode", "mla", "mla_hopper", "paged_attention", "classic_prefill"
]  # fmt: skip
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "": operator.eq,
}  # fmt: skip
# Rows that a program of a decode merges at once, and partial results of each that it reads at once.
MERGED_ROWS, MERGED_PARTS = 4, 8
LEAST_SHARED_KIB = 99  # Taken of a GPU that ``tuning.toml`` does not know


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the choices see it."""

    capability: tuple[int, int]  # its compute capability; (0, 0) for Triton's interpreter
    sms: int  # multiprocessors
    # peak memory bandwidth in GB/s; None: taken for the reference's per multiprocessor
    bandwidth_gbps: float | None = None

    @property
    def shared_kib(self) -> int:
        """KiB of shared memory that a block may have."""
        known: int = _tuning()["shared_kib"].get(_text(self.capability), LEAST_SHARED_KIB)
        return known

    @property
    def gbps(self) -> float:
        """Its bandwidth; where that is not known, the reference's for so many multiprocessors."""
        reference = _tuning()["reference"]
        share: float = reference["bandwidth_gbps"] / reference["sms"]
        return share * self.sms if self.bandwidth_gbps is None else self.bandwidth_gbps

    @property
    def bandwidth_share(self) -> float:
        """Bandwidth per multiprocessor over the reference's, 1 at most: beyond, more programs were not needed."""
        reference = _tuning()["reference"]
        share: float = self.gbps / self.sms / (reference["bandwidth_gbps"] / reference["sms"])
        return min(1.0, share)


def measured(capability: tuple[int, int] | None) -> bool:
    """Whether the choices for GPUs of this compute capability were measured on one."""
    return capability == MEASURED_CAPABILITY


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel is launched."""

    block_m: int  # query rows (tokens x heads of a group) of a program; in ``tuning.toml`` of decodes the most
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    by_tma: bool = False  # MLA's: the cache is read through tensor descriptors where pages hold whole tiles
    registers: int = 0  # with which a thread starts; 0: the compiler's choice
    turns: bool = False  # the groups of the warp-specialised prefill take turns at the tensor cores
    sums_apart: bool = False  # its threads add up the weights of their own keys, and all threads' only at the end
    # its groups begin a tile's scores before the values of the tile before, and keep sums apart, where the longest
    # request has more keys than this; 0: nowhere
    ahead: int = 0


@lru_cache(maxsize=4096)
def _chosen(kernel: Kernel, gpu_facts: tuple[tuple[int, int], int], given: tuple[tuple[str, Any], ...]) -> Tile | None:
    capability, shared_kib = gpu_facts
    known = {"capability": capability, "shared_kib": shared_kib, **dict(given)}
    for conditions, tile in _tiles()[kernel]:
        if all(holds(known[field], wanted) for field, holds, wanted in conditions):
            return tile
    return None


def find_tile(kernel: Kernel, gpu: Gpu | tuple[int, int], **given: Any) -> Tile | None:
    """Return the tile of a kernel's first row whose conditions hold; None: no row's do."""
    # gpu: or its compute capability.
    # given: what the rows of this kernel ask for, besides the GPU.
    if not isinstance(gpu, Gpu):
        gpu = Gpu(gpu, 1)
    return _chosen(kernel, (gpu.capability, gpu.shared_kib), tuple(given.items()))


def tile_of(kernel: Kernel, gpu: Gpu | tuple[int, int], **given: Any) -> Tile:
    """Return ``find_tile``'s, for a kernel whose last row has no condition."""
    tile = find_tile(kernel, gpu, **given)
    assert tile is not None
    return tile


@dataclass(frozen=True, slots=True)
class Cost:
    """What a way to run a prefill costs, as ``tuning.toml`` says."""

    tile: float
    border: float
    alone: float
    two: float
    key: float = 0.0
    row: float = 0.0
    fixed: float = 0.0
    merge: float = 0.0

    def shared(self, pairs: float, items: Any, last: Any) -> Any:
        """Return the time of the warp-specialised kernel's programs in ns, without the merge: numbers or arrays."""
        return np.maximum(2 * self.tile * (pairs + items * self.border), last * self.alone)


@cache
def way_cost(name: str) -> Cost:
    """Return the cost of a way of ``tuning.toml``."""
    return Cost(**{"alone": 0.0, "two": 0.0, **_tuning()["ways"][name]})


@dataclass(frozen=True, slots=True)
class DecodeSplits:
    """``[decode]`` of ``tuning.toml``."""

    warps: int
    most: int
    least_keys: int
    waves: int
    bandwidth: float
    idle: float
    tile_us: float
    key_us: float
    start_us: float
    merge_us: float
    merge_round_us: float
    merge_apart_us: float
    merge_parts_us: float
    apart: int
    uneven: float
    uneven_parts: tuple[int, ...]
    beside: float

    def places(self, gpu: Gpu, tile: Tile) -> int:
        """Return how many programs a GPU has at a time."""
        return gpu.sms * max(1, self.warps // tile.num_warps)

    def us_of_a_key(self, units: int, gpu: Gpu, key_bytes: int) -> float:
        """Return what reading a key takes at least, of so many programs that each read ``key_bytes`` of it."""
        return units * key_bytes / (self.bandwidth * 1e3 * gpu.gbps)

    def merging_us(self, splits: Any, rows: int, apart: bool) -> Any:
        """Return what merging so many partial results of each row takes, a number or an array."""
        # rows: that a program of the decode merges, unless ``apart``.
        # apart: whether a launch of its own merges all rows.
        if apart:
            return self.merge_apart_us + self.merge_parts_us * splits
        return self.merge_us + self.merge_round_us * -(-rows // MERGED_ROWS) * -(-splits // MERGED_PARTS)

    def of_equal(
        self, programs: int, keys: int, gpu: Gpu, tile: Tile, key_bytes: int, rows: int, apart: bool
    ) -> int:  # fmt: skip
        """Return into how many splits requests of ``keys`` each are cut."""
        # A program takes a time for each of its tiles, and all together no less than their bytes take, which is longer
        # where the last wave leaves places empty. Of all counts those are tried that fill so many waves best.
        # programs: unsplit.
        # key_bytes: of a key and its value, of one KV head.
        places = self.places(gpu, tile)
        most = max(1, min(-(-keys // self.least_keys), self.most * gpu.sms // max(1, programs)))
        least = keys * self.us_of_a_key(programs, gpu, key_bytes)

        def cost(splits: int) -> float:
            waves, own = -(-programs * splits // places), -(-keys // splits)
            empty = 1.0 - programs * splits / (waves * places)
            busy = waves * (self.tile_us * -(-own // tile.block_n) + self.key_us * own)
            merging: float = self.merging_us(splits, rows, apart) if splits > 1 else 0.0
            return max(least * (1.0 + self.idle * empty), busy) + waves * self.start_us + merging

        tried = {waves * places // max(1, programs) for waves in range(1, self.waves + 1)} | {8, 16, 24, 32, 48, 64, 96}
        return min(sorted({1, *(max(1, min(most, splits)) for splits in tried)}), key=cost)


@dataclass(frozen=True, slots=True)
class LatentSplits:
    """``[latents]`` of ``tuning.toml``."""

    tile: int
    program: int
    merge: int
    most: int
    even: float
    parts: tuple[float, ...]
    end: float

    def of_equal(self, programs: int, keys: int, sms: int) -> int:
        """Return into how many splits requests of ``keys`` each are cut: fewer than ``2 * sms`` programs run."""
        tiles = -(-keys // self.tile)

        def cost(splits: int) -> int:
            waves = -(-programs * splits // sms)
            return waves * (-(-tiles // splits) + self.program) + (self.merge if splits > 1 else 0)

        most = max(1, min((2 * sms - 1) // max(programs, 1), tiles))
        return min(range(1, most + 1), key=cost)


@cache
def decode_splits() -> DecodeSplits:
    """Return how decodes are split."""
    given = _tuning()["decode"]
    return DecodeSplits(**{**given, "uneven_parts": tuple(given["uneven_parts"])})


@dataclass(frozen=True, slots=True)
class Joined:
    """``[joined]`` of ``tuning.toml``."""

    programs: int
    keys: int
    alone: int


@cache
def joined() -> Joined:
    """Return which steps with prefills are one launch of the decode kernel."""
    return Joined(**_tuning()["joined"])


@cache
def share_parts() -> tuple[float, ...]:
    """Return into how many parts a multiprocessor's share of a prefill's keys is cut: sizes of shares to try."""
    return tuple(_tuning()["shares"]["parts"])


@cache
def least_share() -> int:
    """Return the fewest keys of a share."""
    least: int = _tuning()["shares"]["least_keys"]
    return least


@cache
def two_streams() -> dict[int, tuple[int, int]]:
    """Return by bytes that a mixed step's decodes read at least, the largest first, between how many query tokens its
    prefills run beside them."""
    given: dict[str, list[int]] = _tuning()["two_streams"]
    return {int(mib) << 20: (given[mib][0], given[mib][1]) for mib in sorted(given, key=int, reverse=True)}


@cache
def latent_splits() -> LatentSplits:
    """Return how decodes over latents are split."""
    given = _tuning()["latents"]
    return LatentSplits(**{**given, "parts": tuple(given["parts"])})


@lru_cache(maxsize=4096)
def keys_class(kernel: Kernel, keys: int) -> tuple[bool, ...]:
    """Return which of the rows' conditions on the longest request's keys hold: equal where the same tile is chosen."""
    return tuple(
        holds(keys, wanted)
        for conditions, _ in _tiles()[kernel]
        for field, holds, wanted in conditions
        if field == "keys"
    )


@lru_cache(maxsize=4096)
def section_of(kv_heads: int, head_bytes: int) -> int:
    """Return for how many KV heads, a divisor of all, a tile of rows runs before the next tile."""
    # head_bytes: keys and values of the longest request and one KV head.
    fit = _tuning()["sections"]["mib"] * (1 << 20) // max(1, head_bytes)
    return max(heads for heads in range(1, kv_heads + 1) if kv_heads % heads == 0 and heads <= max(1, fit))


@cache
def _tuning() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


_Conditions = tuple[tuple[str, Callable[[Any, Any], bool], Any], ...]


@cache
def _tiles() -> dict[str, tuple[tuple[_Conditions, Tile], ...]]:
    """Return the rows of each kernel, their conditions parsed."""
    return {
        kernel: tuple(
            (
                tuple(_condition(field, text) for field, text in row.get("when", {}).items()),
                _tile(**row),
            )
            for row in rows
        )
        for kernel, rows in _tuning()["tiles"].items()
    }


def _tile(tile: tuple[int, int, int, int], when: object = None, **more: Any) -> Tile:
    return Tile(*tile, **more)


def _condition(field: str, text: Any) -> tuple[str, Callable[[Any, Any], bool], Any]:
    """Return a condition's field, operator and value."""
    if not isinstance(text, str):
        return field, operator.eq, text
    sign = next(sign for sign in _OPERATORS if text.startswith(sign))
    value: Any = text.removeprefix(sign)
    if field == "capability":
        value = tuple(int(part) for part in value.split("."))
    elif sign or value.isdecimal():
        value = float(value)
    return field, _OPERATORS[sign], value


def _text(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)
