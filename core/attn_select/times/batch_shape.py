"""``BatchShape``: the requests of one step, by query length and sequence length.

Written as in vLLM's attention benchmarks (vllm-project/vllm benchmarks/attention_benchmarks/batch_spec.py):
``64q1s4k`` is 64 requests with one new token each and 4096 tokens with it; ``2q512s8k_32q1s2k`` is a mixed batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from attn_select.errors import ConfigError, show

_MOST = 2**31 - 1
_GROUP = re.compile(r"(\d{1,10})?q(\d{1,10})([km]?)(?:s(\d{1,10})([km]?))?", re.ASCII)
_SYNTAX = (
    "expected groups such as 64q1s4k (requests, q and new tokens, s and all tokens; k is 1024, m 1024 k) joined by _"
)
_LONGEST = 10_000
"""Characters of a batch."""


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests of equal lengths.

    Attributes:
        count: how many requests.
        query_len: new tokens of each.
        seq_len: tokens of each that attention reads, the new ones included.

    Raises:
        ConfigError: a value is below 1 or above 2**31 - 1, or ``seq_len`` is less than ``query_len``.
    """

    count: int
    query_len: int
    seq_len: int

    def __post_init__(self) -> None:
        for field in ("count", "query_len", "seq_len"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
                raise ConfigError(f"{field} = {show(value)}: expected an integer from 1 to {_MOST}", fields=[field])
        if self.seq_len < self.query_len:
            text = f"seq_len = {self.seq_len} is less than query_len = {self.query_len}: it counts the new tokens too"
            raise ConfigError(text, fields=["seq_len", "query_len"])

    def __str__(self) -> str:
        count = "" if self.count == 1 else str(self.count)
        seq_len = "" if self.seq_len == self.query_len else f"s{_tokens(self.seq_len)}"
        return f"{count}q{_tokens(self.query_len)}{seq_len}"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One step's requests.

    ``groups`` are put in one order: the longest queries first, then the longest sequences; groups of equal lengths
    become one. So equal batches are equal objects, and ``str()`` is one text for each that ``parse_batch_shape`` reads.

    Raises:
        ConfigError: no group.
    """

    groups: tuple[RequestGroup, ...]

    def __post_init__(self) -> None:
        counts: dict[tuple[int, int], int] = {}
        for group in self.groups:
            lengths = group.query_len, group.seq_len
            counts[lengths] = counts.get(lengths, 0) + group.count
        if not counts:
            raise ConfigError("groups = (): a batch has at least one request", fields=["groups"])
        ordered = sorted(counts, reverse=True)
        object.__setattr__(self, "groups", tuple([RequestGroup(counts[each], *each) for each in ordered]))

    def __str__(self) -> str:
        return "_".join(map(str, self.groups))

    @property
    def requests(self) -> list[tuple[int, int]]:
        """The query length and sequence length of each request."""
        return [(group.query_len, group.seq_len) for group in self.groups for _ in range(group.count)]

    @property
    def num_requests(self) -> int:
        """How many requests."""
        return sum([group.count for group in self.groups])

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum([group.count * group.query_len for group in self.groups])

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that attention reads, summed over all requests."""
        return sum([group.count * group.seq_len for group in self.groups])

    @property
    def num_pairs(self) -> int:
        """New tokens times tokens, summed over all requests: the work of attention grows with it."""
        return sum([group.count * group.query_len * group.seq_len for group in self.groups])

    @property
    def effective_requests(self) -> float:
        """How many requests as long as the longest one have as many tokens: ``num_requests`` where all are alike."""
        return self.num_kv_tokens / self.max_seq_len

    @property
    def max_query_len(self) -> int:
        """New tokens of the request that has most."""
        return self.groups[0].query_len

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest request, the new ones included."""
        return max([group.seq_len for group in self.groups])


def parse_batch_shape(text: str) -> BatchShape:
    """Read a batch such as ``64q1s4k`` or ``2q512s8k_32q1s2k``.

    A group is ``[COUNT]qQUERY_LEN[sSEQ_LEN]``: count 1 and the query length are the defaults; ``k`` is 1024, ``m``
    1024 k.

    Raises:
        ConfigError: what is not written so, or lengths that cannot be.
    """
    if not isinstance(text, str):
        raise ConfigError(f"batch = {show(text)}: {_SYNTAX}", fields=["batch"])
    if len(text) > _LONGEST:
        told = f"batch = {show(text)}: {len(text)} characters; expected at most {_LONGEST}"
        raise ConfigError(told, fields=["batch"], hint="write requests of equal lengths as one group: 64q1s4k")
    groups: list[RequestGroup] = []
    for part in text.strip().lower().split("_"):
        match = _GROUP.fullmatch(part)
        if match is None:
            where = f"{show(part)} in batch = {show(text)}" if part != text else f"batch = {show(text)}"
            raise ConfigError(f"{where}: {_SYNTAX}", fields=["batch"])
        count, query, query_k, seq, seq_k = match.groups()
        query_len = _number(query, query_k)
        seq_len = query_len if seq is None else _number(seq, seq_k)
        try:
            groups.append(RequestGroup(1 if count is None else int(count), query_len, seq_len))
        except ConfigError as error:
            raise ConfigError(f"batch = {show(text)}: {error.message}", fields=["batch"]) from None
    return BatchShape(tuple(groups))


def _number(digits: str, unit: str) -> int:
    return int(digits) * {"": 1, "k": 1024, "m": 1024**2}[unit]


def _tokens(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)
