"""``StepChoice``: the backend that is predicted to run a step fastest, among those that read one cache.

A step is known by five numbers that every batch carries: its requests, tokens, longest query, keys and longest
sequence. They are rounded, and each set of rounded numbers is worked out once. So a choice depends on the step and on
the times alone, never on the steps before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from math import log2

from attn_select.config import AttentionConfig, Phase
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.model import TimeModel
from attn_select.times.workload import WeightedShape

_MOST_KNOWN = 1 << 16
_LEAST_PREPARED = 64
_UNEVEN = 1.2
"""A longest sequence of more than this many times the mean has a group of its own."""

Names = tuple[str | None, str | None]
"""The backend of a step's prefills and that of its decodes; None where the group has none."""
Models = Mapping[str, TimeModel]
Groups = tuple[RequestGroup, ...]


class StepChoice:
    """Chooses per step.

    Args:
        config: the layers.
        chosen: the backend per phase that runs where times do not decide.
        models: per phase in which times decide, the model of each candidate; of equal times the first wins.
        apart: whether prefills and decodes of one batch are always computed apart (MLA). Else a backend that serves
            both phases may take the whole batch, and two share it only where that takes less.
    """

    def __init__(
        self,
        config: AttentionConfig,
        chosen: Mapping[Phase, str],
        models: Mapping[Phase, Models],
        apart: bool = False,
    ) -> None:
        self.longest_decode = 1 + config.num_speculative_tokens if config.has_cache else 0
        self._chosen: Names = chosen.get("prefill"), chosen.get("decode")
        self._prefill, self._decode = models.get("prefill", {}), models.get("decode", {})
        self._whole = {} if apart else {name: each for name, each in self._prefill.items() if name in self._decode}
        self._apart = apart or len(set(chosen.values())) > 1
        self._decodes_known: dict[tuple[int, ...], Names] = {}
        self._others_known: dict[tuple[int, ...], Names] = {}

    def __call__(
        self, num_requests: int, num_tokens: int, max_query_len: int, num_keys: int, max_seq_len: int
    ) -> Names:
        """Return the backends of a step."""
        key: tuple[int, ...]
        if max_query_len <= self.longest_decode:
            mean = num_keys / num_requests or 1.0
            key = (
                round(16 * log2(num_requests)),  # the finest, because requests' thread blocks come in waves
                num_tokens // num_requests,
                round(4 * log2(mean)),
                round(log2(max(1.0, max_seq_len / mean))),
            )
            found = self._decodes_known.get(key)
        else:
            key = (
                round(2 * log2(num_requests)),
                round(2 * log2(num_tokens)),
                round(2 * log2(max_query_len)),
                round(2 * log2(num_keys or 1)),
            )
            found = self._others_known.get(key)
        return found or self._work_out(max_query_len <= self.longest_decode, *key)

    def prepare(self, most_requests: int, most_tokens: int) -> None:
        """Work out beforehand what decodes are known by: any number of requests up to ``most_requests``, of a mean
        length from ``_LEAST_PREPARED`` to ``most_tokens``, the longest no more than about five times the mean.

        Other steps are worked out when they are first seen.
        """
        if not self._decode:
            return
        means = range(round(4 * log2(_LEAST_PREPARED)), round(4 * log2(most_tokens)) + 1)
        for requests in dict.fromkeys([round(16 * log2(count)) for count in range(1, most_requests + 1)]):
            for mean in means:
                for skew in range(3):
                    self._work_out(True, requests, self.longest_decode, mean, skew)

    def captured(
        self, num_requests: int, query_len: int, shapes: Iterable[WeightedShape], able: Collection[str]
    ) -> Names:
        """Return the backends of a size of decodes that is captured, and replayed with any lengths.

        Args:
            shapes: the decodes of the workload: their lengths, each with its share, are those that are predicted.
            able: the candidates whose builder can be captured so.
        """
        models = {name: model for name, model in self._decode.items() if name in able}
        times = dict.fromkeys(models, 0.0)
        for shape in shapes:
            batch = shape.batch
            num_keys = sum([group.count * group.seq_len for group in batch.groups]) / batch.num_requests
            decodes = _decodes(num_requests, query_len, round(num_keys * num_requests), batch.max_seq_len)
            for name, time_us in _times(models, decodes).items():
                times[name] += shape.weight * time_us
        return self._with(min(times, key=times.__getitem__, default=None))

    def _work_out(self, decodes: bool, *key: int) -> Names:
        known = self._decodes_known if decodes else self._others_known
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = found = (self._of_decodes if decodes else self._of_others)(*key)
        return found

    def _of_decodes(self, requests: int, query_len: int, mean: int, skew: int) -> Names:
        num_requests, seq_len = round(2 ** (requests / 16)), 2 ** (mean / 4)
        groups = _decodes(num_requests, query_len, round(seq_len * num_requests), round(seq_len * 2**skew))
        return self._with(_fastest(self._decode, groups))

    def _of_others(self, requests: int, tokens: int, query: int, keys: int) -> Names:
        num_requests, num_tokens, max_query_len, num_keys = (
            round(2**each) for each in (requests / 2, tokens / 2, query / 2, keys / 2)
        )
        prefills, decodes = _prefills_and_decodes(num_requests, num_tokens, max_query_len, num_keys)
        if decodes and self.longest_decode:  # encoders have no decodes
            return self._mixed(prefills, decodes)
        name = _fastest(self._prefill, prefills + decodes)
        return self._with(name) if name is None or name in self._whole else (name, self._chosen[1])

    def _with(self, name: str | None) -> Names:
        """Return the backends of decodes by ``name``: alone where it serves prefills too, so that none is split off."""
        if name is None or name in self._whole:
            return (name, name) if name else self._chosen
        return self._chosen[0], name

    def _mixed(self, prefills: Groups, decodes: Groups) -> Names:
        if self._whole:
            times = _times(self._whole, prefills + decodes)
            one = min(times, key=times.__getitem__)
            of_prefills, of_decodes = _times(self._prefill, prefills), _times(self._whole, decodes)
            first, second = min(of_prefills, key=of_prefills.__getitem__), min(of_decodes, key=of_decodes.__getitem__)
            less = of_prefills[first] + of_decodes[second] < times[one]
            return (first, second) if less and first != second else (one, one)
        if not self._apart:
            return self._chosen
        return (
            _fastest(self._prefill, prefills) or self._chosen[0],
            _fastest(self._decode, decodes) or self._chosen[1],
        )


def _times(models: Models, groups: Groups) -> dict[str, float]:
    batch = BatchShape(groups)
    found = {name: model.predict(batch) for name, model in models.items()}
    return {name: math.inf if each is None else each.time_us for name, each in found.items()}


def _fastest(models: Models, groups: Groups) -> str | None:
    """Return the first of the fastest; None where there is no candidate."""
    times = _times(models, groups)
    return min(times, key=times.__getitem__, default=None)


def _decodes(num_requests: int, query_len: int, num_keys: int, max_seq_len: int) -> Groups:
    """Return decodes with these keys in all: of one length, or one of them as long as the longest."""
    query_len = max(1, query_len)
    mean = max(query_len, round(num_keys / num_requests))
    if num_requests == 1 or max_seq_len <= _UNEVEN * mean:
        return (RequestGroup(num_requests, query_len, mean),)
    rest = max(query_len, round((num_keys - max_seq_len) / (num_requests - 1)))
    return RequestGroup(1, query_len, max_seq_len), RequestGroup(num_requests - 1, query_len, rest)


def _prefills_and_decodes(
    num_requests: int, num_tokens: int, max_query_len: int, num_keys: int
) -> tuple[Groups, Groups]:
    """Return prefills of the longest query and decodes of one token with these totals, all with the same context."""
    prefills = min(num_requests, max(1, round((num_tokens - num_requests) / max(1, max_query_len - 1))))
    context = max(0, num_keys - num_tokens) // num_requests
    if prefills == num_requests:
        query_len = max(1, round(num_tokens / num_requests))
        return (RequestGroup(num_requests, query_len, query_len + context),), ()
    decodes = RequestGroup(num_requests - prefills, 1, 1 + context)
    return (RequestGroup(prefills, max_query_len, max_query_len + context),), (decodes,)
