"""The runtimes of ``FLASHINFER_GDN``, ``FLASHINFER_KDA`` and ``FLASHINFER_MAMBA``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from attn_select.layer.config import Phase
from attn_select.layer.state import NORM_EPSILON
from attn_select.runtime.batch import to_device
from attn_select.runtime.states import (
    Gates,
    StateBackend,
    StateContext,
    StateImpl,
    StatePart,
    gathered_states,
    slots_in_pool,
)
from attn_select_flashinfer.facts.states import CHUNK, KDA_LEAST_LOG_DECAY, MAMBA_LEAST_LOG_DECAY
from attn_select_flashinfer.runtime import library

Tokens = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


class PooledStateImpl(StateImpl):
    """Runs one layer by kernels of this plugin, one for each phase."""

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        kernels = [plan.kernel_name or "" for plan in context.plans.values()]
        library.flashinfer().check(*(kernel.partition("-")[0] for kernel in kernels))  # as ``StateKernel`` names them

    def forward(
        self,
        phase: Phase,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Gates,
        states: Tensor,
        part: StatePart,
        output: Tensor,
    ) -> None:
        """Run a part of a step, as ``StateImpl.forward`` documents it."""
        run = self.decode if phase == "decode" else self.prefill
        output.copy_(run((query, key, value), gates, states, part))

    @abstractmethod
    def decode(self, tokens: Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        """Write the states behind one token of each request; return the outputs ``(B, num_v_heads, v_head_size)``."""

    @abstractmethod
    def prefill(self, tokens: Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        """Write the states behind the last token of each request; return the outputs of all tokens alike."""


class PooledStateBackend(StateBackend):
    """Kernels of this plugin that read and write states in the pool; they know no slot below 0."""

    reads_zeros = True

    @classmethod
    def prepare(cls) -> None:
        """As ``FlashInferLibraryBackend.prepare``."""
        library.flashinfer()


class FlashInferGdnImpl(PooledStateImpl):
    """Runs one layer."""

    raw_gates = ("decode",)

    def prefill(self, tokens: Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        (query, key, value), state = tokens, gathered_states(states, part)
        found, last = library.flashinfer().chunk_gated_delta_rule(
            q=_normalised(query),
            k=_normalised(key),
            v=value.contiguous(),
            # The kernels add 1e-10 before their logarithm, in 0.6.14 (include/flashinfer/flat/hopper/collective) as in
            # 0.7.2 (flashinfer/gdn_kernels): a decay of 0 is no infinity.
            g=gates.log_decay.exp().contiguous(),
            beta=gates.write_strength,
            scale=self.context.config.scale,
            initial_state=state,
            output_final_state=True,
            cu_seqlens=part.query_start_loc.long(),
            output_state=torch.empty_like(state),
        )
        states[part.write_slots] = last.to(states.dtype)
        output: Tensor = found
        return output

    def decode(self, tokens: Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        raw = gates.raw
        assert raw is not None
        assert raw.b is not None
        read, write = slots_in_pool(states, part)
        # (B, 1, heads, size): one token per request.
        named = {name: each.contiguous().unsqueeze(1) for name, each in zip("qkv", tokens, strict=True)}
        found, _ = library.flashinfer().gated_delta_rule_decode_pretranspose(
            **named,
            state=None,
            A_log=raw.A_log,
            a=raw.a.contiguous().unsqueeze(1),
            dt_bias=raw.dt_bias,
            b=raw.b.contiguous().unsqueeze(1),
            scale=self.context.config.scale,
            use_qk_l2norm=True,
            initial_state=states,
            initial_state_indices=read,
            output_state_indices=write,
        )
        output: Tensor = found.squeeze(1)
        return output


def _normalised(rows: Tensor) -> Tensor:
    """Return queries or keys of length 1 in their own dtype. The entry does it since 0.7; in 0.6.14 it does not."""
    wide = rows.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()).to(rows.dtype).contiguous()


class FlashInferGdnBackend(PooledStateBackend):
    """Gated delta net layers by FlashInfer."""

    impl_cls = FlashInferGdnImpl


class FlashInferKdaImpl(PooledStateImpl):
    """Runs one layer."""

    raw_gates = ("prefill",)
    least_log_decay: ClassVar[Mapping[Phase, float]] = {"prefill": KDA_LEAST_LOG_DECAY.value}

    def decode(self, tokens: Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        strength, (read, write) = gates.write_strength, slots_in_pool(states, part)
        assert strength is not None
        # Gates are given after their activation.
        gated = {
            "g": gates.log_decay.to(torch.bfloat16).unsqueeze(0),
            "beta": strength.to(torch.bfloat16).unsqueeze(0),
            "use_gate_in_kernel": False,
            "initial_state_source": states,
            "initial_state_indices": read,
        }
        return self._run(tokens, states, part, write, gated)

    def prefill(self, tokens: Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
        raw, (read, write) = gates.raw, slots_in_pool(states, part)
        assert raw is not None
        assert raw.b is not None
        # A prefill starts from the state in the slot that it writes to: the state to start from is copied there first.
        states[write] = states[read]
        gated = {
            "g": raw.a.contiguous().unsqueeze(0),
            "beta": raw.b.contiguous().unsqueeze(0),
            "A_log": raw.A_log,
            "dt_bias": raw.dt_bias,
            "use_gate_in_kernel": True,
            "beta_is_logit": True,
        }
        return self._run(tokens, states, part, write, gated)

    def _run(self, tokens: Tokens, states: Tensor, part: StatePart, write: Tensor, gated: dict[str, Any]) -> Tensor:
        # Packed, (1, T, heads, size): without cu_seqlens decodes copy the states of a pool out and back.
        named = {name: each.contiguous().unsqueeze(0) for name, each in zip("qkv", tokens, strict=True)}
        found, _ = library.flashinfer().recurrent_kda(
            **named,
            **gated,
            scale=self.context.config.scale,
            initial_state=states,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=part.query_start_loc,
            ssm_state_indices=write,
        )
        output: Tensor = found.squeeze(0)
        return output


class FlashInferKdaBackend(PooledStateBackend):
    """Kimi delta attention by FlashInfer."""

    impl_cls = FlashInferKdaImpl


class FlashInferMambaImpl(PooledStateImpl):
    """Runs one layer."""

    raw_gates = ("prefill", "decode")
    least_log_decay: ClassVar[Mapping[Phase, float]] = {"prefill": MAMBA_LEAST_LOG_DECAY.value}

    def __init__(self, context: StateContext) -> None:
        super().__init__(context)
        self._no_skip = torch.zeros(context.config.num_v_heads, device=context.device)

    def prefill(self, tokens: Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
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

    def decode(self, tokens: Tokens, gates: Gates, states: Tensor, part: StatePart) -> Tensor:
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


class FlashInferMambaBackend(PooledStateBackend):
    """Mamba-2 layers by FlashInfer."""

    impl_cls = FlashInferMambaImpl
