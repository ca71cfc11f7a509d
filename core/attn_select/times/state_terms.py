"""``StatePhaseWork``: the features of batches of layers that keep a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from attn_select.layer.state import StateConfig
from attn_select.times.batch_shape import RequestGroup
from attn_select.times.state_work import request_states
from attn_select.times.terms import Coordinates, Schedule, cold_bytes, place


@dataclass(frozen=True, slots=True)
class StatePhaseWork:
    """One phase of one kind of such layers: as ``attn_select.times.terms.PhaseWork``.

    Attributes:
        config: the layer.
        decode: whether it is the phase of decodes.
        sm_count: multiprocessors of the device.
    """

    config: StateConfig
    decode: bool
    sm_count: int
    schedules: ClassVar[tuple[Schedule, ...]] = ()
    """No kernel cuts the work of one head of a request into parts."""
    hides_keys: ClassVar[bool] = False

    def features(
        self, groups: Sequence[RequestGroup], l2_bytes: float, schedule: Schedule | None = None
    ) -> tuple[float, ...]:
        """Return the ``TERMS`` of requests of this phase; the terms that only attention has are 0."""
        moved = flops = 0.0
        tiles = tokens = longest = 0
        for group in groups:
            each = request_states(self.config, group.query_len, group.seq_len)
            moved += group.count * (each.read_bytes + each.written_bytes + each.token_bytes)
            flops += group.count * each.flops
            chunks = 1 if self.decode else -(-group.query_len // self.config.chunk_size)
            tiles += group.count * self.config.num_v_heads * chunks
            tokens += group.count * group.query_len
            longest = max(longest, group.query_len)
        waves = -(-tiles // self.sm_count)
        work = float(tiles), float(waves), float(tokens), float(longest)
        return 1.0, moved, flops, *work, 0.0, 0.0, 0.0, 0.0, 0.0, cold_bytes(moved, l2_bytes)

    def coordinates(self, groups: Sequence[RequestGroup], cold_share: float, whole: bool = False) -> Coordinates:
        """Return where requests lie among others, by their new tokens."""
        return place(groups, [group.query_len for group in groups], cold_share)
