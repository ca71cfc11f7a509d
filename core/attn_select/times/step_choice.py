"""``StepChoice``: the backend that is predicted to run a step fastest, among those that read one cache.

A step is known by the totals of its decodes and of its prefills (``Requests``). They are rounded, and each set of
rounded numbers is worked out once. So a choice depends on the step and on the times alone, never on the steps before
it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from math import log2
from typing import NamedTuple, TypeVar

from attn_select.layer.config import AttentionConfig, Phase
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.model import TimeModel
from attn_select.times.workload import WeightedShape

_MOST_KNOWN = 1 << 16
_LEAST_PREPARED, _MOST_PREFILLS = 64, 8
_LEAST_CONTEXT = 32
"""Prefills with fewer cached tokens each count as having none."""
_UNEVEN = 1.2
"""A longest sequence of more than this many times the mean has a group of its own."""

WORTH = 1.02
"""Another backend than the chosen one has to be predicted this many times as fast: more than a tie. The chosen one is
the best of the whole workload, which says little of a step that is unlike it. On 262 held-out workloads of an H200
(research/bench_dispatch.py) steps cost 1.014 times the best backend's time with this, 1.017 with 1.08."""

Names = tuple[str | None, str | None]
"""The backend of a step's prefills, and the backend of its decodes; None where the group has none."""
Models = Mapping[str, TimeModel]
Groups = tuple[RequestGroup, ...]
Key = tuple[int, int, int, int]
K = TypeVar("K")
V = TypeVar("V")
Times = tuple[float, ...]
"""Microseconds of each candidate, in the order of the models; infinite where a model predicts none."""


Requests = tuple[int, int, int, int, int]
"""A step's decodes, or its prefills: how many they are, their new tokens, the most of one of them, their keys, the most
of one of them."""


class Lead(NamedTuple):
    """The lengths of a batch: its first requests, all with the same number of new tokens, and the others one by one.

    Attributes:
        num_requests: the first requests; 0 where requests with as many new tokens stand further behind.
        query_len: new tokens of each.
        longest: keys of the one that has most.
        query_lens, seq_lens: new tokens and keys of each of the others.
    """

    num_requests: int
    query_len: int
    longest: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


def lead_of(query_lens: Sequence[int], seq_lens: Sequence[int]) -> Lead:
    """Return the lengths of a batch of at least one request."""
    query_len = query_lens[0]
    count = query_lens.count(query_len)
    if query_lens[:count].count(query_len) != count:
        count = 0
    longest = max(seq_lens[:count], default=0)
    return Lead(count, query_len, longest, tuple(query_lens[count:]), tuple(seq_lens[count:]))


def by_phase(whole: Requests, lead: Lead, longest_decode: int) -> tuple[Requests | None, Requests | None]:
    """Return the prefills and the decodes of a step; None where it has none.

    Args:
        whole: all requests of the step.
        lead: its lengths.
        longest_decode: new tokens up to which a request is a decode.
    """
    _, own_query, longest, query_lens, seq_lens = lead
    num_requests = tokens = query = keys = most = 0  # of the others that are of another phase than the first requests
    decodes = own_query <= longest_decode
    for new, seq_len in zip(query_lens, seq_lens, strict=True):
        if (new <= longest_decode) is decodes:
            own_query = new if new > own_query else own_query
            longest = seq_len if seq_len > longest else longest
        else:
            num_requests, tokens, keys = num_requests + 1, tokens + new, keys + seq_len
            query = new if new > query else query
            most = seq_len if seq_len > most else most
    same = whole[0] - num_requests, whole[1] - tokens, own_query, whole[3] - keys, longest
    other = (num_requests, tokens, query, keys, most) if num_requests else None
    return (other, same) if decodes else (same, other)


class StepChoice:
    """Chooses per step.

    Args:
        config: the layers.
        chosen: the backend per phase that runs unless another one is ``WORTH`` times as fast.
        models: per phase in which times decide, the model of each candidate; of equal times the first wins.
        apart: whether prefills and decodes of one batch are always computed apart (MLA), so that each takes its own
            time. Else a backend that serves both phases may take the whole batch, where measured batches show how long
            both take together, and two share it only where that takes less.
    """

    def __init__(
        self,
        config: AttentionConfig,
        chosen: Mapping[Phase, str],
        models: Mapping[Phase, Models],
        apart: bool = False,
    ) -> None:
        self.longest_decode = config.max_decode_query_len if config.has_cache else 0
        self._chosen: Names = chosen.get("prefill"), chosen.get("decode")
        self._prefill, self._decode = models.get("prefill", {}), models.get("decode", {})
        self._prefill_names, self._decode_names = [*self._prefill], [*self._decode]
        self._both = [] if apart else [name for name in self._prefill if name in self._decode]
        self._decodes_of_both = [(self._decode_names.index(name), name) for name in self._both]
        self._whole = [
            (self._prefill_names.index(name), at, model)
            for at, name in self._decodes_of_both
            if (model := self._prefill[name]).knows_mixed
        ]
        whole = [self._prefill_names[at] for at, _, _ in self._whole]
        self._whole_names: list[Names] = [(name, name) for name in whole]
        self._apart = apart or len(set(chosen.values())) > 1
        self._decode_times: dict[Key, Times] = {}
        self._prefill_times: dict[Key, Times] = {}
        self._decodes_known: dict[Key, Names] = {}
        self._prefills_known: dict[Key, Names] = {}
        self._mixed_known: dict[tuple[Key, Key], Names] = {}

    def __call__(self, prefills: Requests | None, decodes: Requests | None) -> Names:
        """Return the backends of a step; it has prefills, decodes, or both."""
        if prefills is None:
            assert decodes is not None
            key = _decode_key(decodes)
            return self._decodes_known.get(key) or self._work_out_decodes(key)
        if decodes is None:
            key = _prefill_key(prefills)
            return self._prefills_known.get(key) or self._work_out_prefills(key)
        both = _prefill_key(prefills), _decode_key(decodes)
        return self._mixed_known.get(both) or self._work_out_mixed(both)

    def prepare(self, most_requests: int, most_new_tokens: int, most_tokens: int) -> None:
        """Work out beforehand what most steps are known by; others are worked out when they are first seen.

        Decodes: any number of requests up to ``most_requests``, of a mean length from ``_LEAST_PREPARED`` to
        ``most_tokens``, which the longest does not exceed either. Prefills: up to ``_MOST_PREFILLS`` of up to
        ``most_new_tokens`` in all, with a mean context of none or of ``_LEAST_PREPARED`` to ``most_tokens``.
        """
        counts = range(1, most_requests + 1) if self._decode else ()
        decodes = {(_decode_count(count, skew), skew) for count in counts for skew in range(round(log2(count)) + 1)}
        longest = log2(most_tokens)
        for requests, skew in decodes:
            for mean in range(round(4 * log2(_LEAST_PREPARED)), round(4 * longest) + 1):
                if mean / 4 + skew < longest + 0.7:  # as far as rounding takes them
                    self._work_out_decodes((requests, self.longest_decode, mean, skew))
        contexts = [0, *range(round(log2(_LEAST_PREPARED)), round(longest) + 1)]
        prefills: dict[Key, None] = {}
        for count in range(1, min(_MOST_PREFILLS, most_requests) + 1) if self._prefill else ():
            means = range(round(2 * log2(self.longest_decode + 1)), round(2 * log2(most_new_tokens / count)) + 1)
            skews = range(round(log2(count)) + 1)
            prefills |= dict.fromkeys(product([round(2 * log2(count))], means, skews, contexts))
        for key in prefills:
            self._work_out_prefills(key)

    def captured(
        self, num_requests: int, query_len: int, shapes: Iterable[WeightedShape], able: Collection[str]
    ) -> Names:
        """Return the backends of a size of decodes that is captured, and replayed with any lengths.

        Args:
            shapes: the decodes of the workload: their lengths, each with its share, are those that are predicted.
            able: the candidates whose builder can be captured so.
        """
        models = {name: model for name, model in self._decode.items() if name in able}
        total = [0.0] * len(models)
        for shape in shapes:
            batch = shape.batch
            num_keys = sum([group.count * group.seq_len for group in batch.groups]) / batch.num_requests
            decodes = _decodes(num_requests, query_len, round(num_keys * num_requests), batch.max_seq_len)
            times = _times(models, decodes)
            total = [sofar + shape.weight * time_us for sofar, time_us in zip(total, times, strict=True)]
        return self._with(_fastest([*models], total, self._chosen[1]))

    def _work_out_decodes(self, key: Key) -> Names:
        name = _fastest(self._decode_names, self._times_of_decodes(key), self._chosen[1])
        return _kept(self._decodes_known, key, self._with(name))

    def _work_out_prefills(self, key: Key) -> Names:
        name = _fastest(self._prefill_names, self._times_of_prefills(key), self._chosen[0])
        return _kept(self._prefills_known, key, self._with(name) if name in self._both else self._beside(name))

    def _work_out_mixed(self, key: tuple[Key, Key]) -> Names:
        prefill, decode = self._times_of_prefills(key[0]), self._times_of_decodes(key[1])
        return _kept(self._mixed_known, key, self._mixed(prefill, decode))

    def _times_of_decodes(self, key: Key) -> Times:
        requests, query_len, mean, skew = key
        num_requests, seq_len = round(2 ** (requests / 16)), 2 ** (mean / 4)
        return self._decode_times.get(key) or _kept(
            self._decode_times,
            key,
            _times(
                self._decode,
                _decodes(num_requests, query_len, round(seq_len * num_requests), round(seq_len * 2**skew)),
            ),
        )

    def _times_of_prefills(self, key: Key) -> Times:
        requests, mean, skew, context = key
        num_requests, query_len = round(2 ** (requests / 2)), 2 ** (mean / 2)
        return self._prefill_times.get(key) or _kept(
            self._prefill_times,
            key,
            _times(
                self._prefill,
                _prefills(num_requests, query_len, round(query_len * 2**skew), 2**context if context else 0),
            ),
        )

    def _with(self, name: str | None) -> Names:
        """Return the backends of decodes by ``name``: alone where it serves prefills too, so that none is split off."""
        if name is None or name in self._both:
            return (name, name) if name else self._chosen
        return self._chosen[0], name

    def _beside(self, name: str | None) -> Names:
        """Return the backends of prefills by ``name``."""
        return name or self._chosen[0], self._chosen[1]

    def _mixed(self, prefill: Times, decode: Times) -> Names:
        if not self._both:
            if not self._apart:
                return self._chosen
            return (
                _fastest(self._prefill_names, prefill, self._chosen[0]) or self._chosen[0],
                _fastest(self._decode_names, decode, self._chosen[1]) or self._chosen[1],
            )
        chosen = self._chosen[0], self._chosen[0]
        if chosen not in self._whole_names:
            return self._chosen  # nothing compares with what is not known
        names = self._whole_names
        times = [model.together(prefill[first], decode[second]) for first, second, model in self._whole]
        least = min(prefill)
        first = self._prefill_names[prefill.index(least)]
        at, second = min(self._decodes_of_both, key=lambda each: decode[each[0]])
        if first != second:
            names, times = [*names, (first, second)], [*times, least + decode[at]]
        return _fastest(names, times, chosen) or self._chosen


def _decode_count(count: int, skew: int) -> int:
    """Return 16 times the logarithm of a number of decodes, rounded. Those of one length are told apart finest, because
    their thread blocks come in waves."""
    return 4 * round(4 * log2(count)) if skew else round(16 * log2(count))


def _decode_key(requests: Requests) -> Key:
    count, tokens, _, keys, longest = requests
    mean = keys / count or 1.0
    skew = round(log2(longest / mean or 1.0))
    return _decode_count(count, skew), tokens // count, round(4 * log2(mean)), skew


def _prefill_key(requests: Requests) -> Key:
    count, tokens, longest_query, keys, _ = requests
    mean, context = tokens / count, (keys - tokens) / count
    return (
        round(2 * log2(count)),
        round(2 * log2(mean)),
        round(log2(longest_query / mean)),
        round(log2(context)) if context >= _LEAST_CONTEXT else 0,
    )


def _kept(known: dict[K, V], key: K, found: V) -> V:
    if len(known) >= _MOST_KNOWN:
        known.clear()
    known[key] = found
    return found


def _times(models: Models, groups: Groups) -> Times:
    batch = BatchShape(groups)
    found = [model.predict(batch) for model in models.values()]
    return tuple([math.inf if each is None else each.time_us for each in found])


def _fastest(names: Sequence[K], times: Sequence[float], chosen: K | None) -> K | None:
    """Return the first of the fastest, or the chosen one where none is ``WORTH`` times as fast; None without a time."""
    least = min(times, default=math.inf)
    if least == math.inf:
        return None
    if chosen in names and times[names.index(chosen)] <= WORTH * least:
        return chosen
    return names[times.index(least)]


def _decodes(num_requests: int, query_len: int, num_keys: int, max_seq_len: int) -> Groups:
    """Return decodes with these keys in all: of one length, or one of them as long as the longest."""
    query_len = max(1, query_len)
    mean = max(query_len, round(num_keys / num_requests))
    if num_requests == 1 or max_seq_len <= _UNEVEN * mean:
        return (RequestGroup(num_requests, query_len, mean),)
    rest = max(query_len, round((num_keys - max_seq_len) / (num_requests - 1)))
    return RequestGroup(1, query_len, max_seq_len), RequestGroup(num_requests - 1, query_len, rest)


def _prefills(num_requests: int, mean: float, longest_query: int, context: int) -> Groups:
    """Return prefills of this mean, one of them with the longest query, each with the same context."""
    query_len = max(1, round(mean))
    if num_requests == 1 or longest_query <= _UNEVEN * query_len:
        return (RequestGroup(num_requests, query_len, query_len + context),)
    longest_query = min(longest_query, round(mean * num_requests) - num_requests + 1)
    rest = max(1, round((mean * num_requests - longest_query) / (num_requests - 1)))
    return (
        RequestGroup(1, longest_query, longest_query + context),
        RequestGroup(num_requests - 1, rest, rest + context),
    )
