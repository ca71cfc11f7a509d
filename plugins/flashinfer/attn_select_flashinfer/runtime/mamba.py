"""The runtime of ``FLASHINFER_MAMBA``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.runtime.batch import to_device
from attn_select.runtime.states import Gates, StateContext, StatePart, gathered_states, slots_in_pool
from attn_select_flashinfer.facts.mamba import CHUNK, LEAST_LOG_DECAY
from attn_select_flashinfer.runtime import library


class FlashInferMambaImpl(library.PooledStateImpl):
    """Runs one layer."""

    raw_gates = ("prefill", "decode")
    least_log_decay: ClassVar[Mapping[Phase, float]] = {"prefill": LEAST_LOG_DECAY.value}

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self._no_skip = torch.zeros(context.config.num_v_heads, device=context.device)

    def prefill(self, tokens: library.Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        (query, key, value), raw = tokens, gates.raw
        assert raw is not None
        request, chunk, offset = (to_device(each, states.device) for each in segments(part.query_start_loc_cpu))
        # Packed: a batch of one.
        found, last = library.flashinfer().ssd_combined_fwd(
            x=value.contiguous().unsqueeze(0),
            dt=raw.a.contiguous().unsqueeze(0),
            A=-raw.A_log.exp(),
            B=key.contiguous().unsqueeze(0),
            C=query.contiguous().unsqueeze(0),
            dt_bias=raw.dt_bias,
            dt_softplus=True,
            initial_states=gathered_states(states, part).to(states.dtype),
            seq_idx=request.unsqueeze(0),
            chunk_indices=chunk,
            chunk_offsets=offset,
        )
        states[part.write_slots] = last
        rows: Tensor = found.squeeze(0)
        return rows

    def decode(self, tokens: library.Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        (query, key, value), raw, config = tokens, gates.raw, self.context.config
        assert raw is not None
        read, write = slots_in_pool(states, part)
        width, size = config.v_head_size, config.head_size

        def per_head(numbers: Tensor) -> Tensor:
            """One number for all channels of a head, as the kernel demands: strides of 0."""
            return numbers.unsqueeze(-1).expand(*numbers.shape, width)

        # dt, its bias and D share one dtype. The layer adds D times x itself.
        fixed = {
            "A": per_head(-raw.A_log.exp()).unsqueeze(-1).expand(-1, width, size),
            "D": per_head(self._no_skip),
            "dt_bias": per_head(raw.dt_bias),
            "dt_softplus": True,
        }
        rows = {
            "x": value.contiguous(),
            "dt": per_head(raw.a.float()),
            "B": key.contiguous(),
            "C": query.contiguous(),
            "state_batch_indices": read,
            "dst_state_batch_indices": write,
        }
        # The entry refuses more requests than there are slots, which a captured size may have: padding needs none.
        most = len(states)
        pieces = [
            library.flashinfer().selective_state_update(
                state=states, **fixed, **{name: each[first : first + most] for name, each in rows.items()}
            )
            for first in range(0, len(value), most)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def segments(bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which request each token is of, and the pieces that requests and chunks cut the tokens into."""
    # bounds: int32 ``(B + 1,)`` on the host, prefix sums of the lengths, none of which is 0
    # Returns int32 ``(T,)``, and of each piece the chunk and where in it the piece begins, int32 ``(P,)``: the logical
    # varlen segments of flashinfer/mamba/ssd_combined.py 0.7.2.post1.
    ends = bounds.numpy()
    starts = np.union1d(ends[:-1], np.arange(0, ends[-1], CHUNK, dtype=np.int32))
    request = np.repeat(np.arange(len(ends) - 1, dtype=np.int32), np.diff(ends))
    return torch.from_numpy(request), torch.from_numpy(starts // CHUNK), torch.from_numpy(starts % CHUNK)


class FlashInferMambaBackend(library.PooledStateBackend):
    """Mamba-2 layers by FlashInfer."""

    impl_cls = FlashInferMambaImpl
