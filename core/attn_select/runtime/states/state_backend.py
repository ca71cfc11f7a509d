"""What a backend of layers that keep a state brings to run: ``StateBackend`` and ``StateImpl``.

``BackendSpec.load`` names a subclass of ``StateBackend``. Conventions that all backends keep:

- *The recurrence* is the one of ``attn_select.layer.state``; normalising queries and keys is the backend's part of it.
- *Outputs* are written into the caller's tensor.
- *Log-decays* are at most 0, and minus infinity forgets everything (``StateImpl.least_log_decay``).
- *Slots*: a request whose read slot is -1 starts from zero. A state is written to the slots that the part names and to
  no other, also where a request reads a slot that it does not write. Free slots may hold anything, NaN included.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attn_select.backends.spec import BackendOptions, BackendPlan
from attn_select.layer.config import Phase
from attn_select.layer.state import StateConfig
from attn_select.runtime.states.gates import Gates
from attn_select.runtime.states.state_batch import StatePart


@dataclass(slots=True, eq=False, kw_only=True)
class StateContext:
    """What one backend is made for: one kind of layers on one device.

    Attributes:
        config: the layers.
        plans: the plan of each phase that this backend serves here.
        device: where tensors live.
        options: the backend's ``[backends.NAME]`` table.
        state_layout: of the states, a name of ``attn_select.layer.layouts.STATE_LAYOUTS``.
    """

    config: StateConfig
    plans: Mapping[Phase, BackendPlan]
    device: torch.device
    options: BackendOptions
    state_layout: str


class StateImpl(ABC):
    """Runs the recurrence of one layer."""

    raw_gates: ClassVar[tuple[Phase, ...]] = ()
    """The phases whose kernels activate gates themselves: their ``gates`` have ``raw``."""
    least_log_decay: ClassVar[Mapping[Phase, float]] = {}
    """Per phase the least log-decay that its kernels compute right; checked mode refuses less. A phase that is not here
    takes any, minus infinity too."""

    def __init__(self, context: StateContext) -> None:
        self.context = context

    @abstractmethod
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
        """Run a part of a step: T tokens.

        Args:
            phase: of the part.
            query, key: ``dtype`` ``(T, num_heads, head_size)``, not yet normalised.
            value: ``dtype`` ``(T, num_v_heads, v_head_size)``.
            gates: of the tokens.
            states: the layer's, in the layout of the context.
            part: the requests, and the slots that they read and write.
            output: ``dtype`` ``(T, num_v_heads, v_head_size)``, to be filled.
        """


class StateBackend:
    """The runtime of one backend."""

    impl_cls: ClassVar[type[StateImpl]]
    reads_zeros: ClassVar[bool] = False
    """Whether its kernels read a slot of zeros for requests that start from zero: ``zeros_slot`` of the states."""

    @classmethod
    def prepare(cls) -> None:
        """Make the kernels ready to be called, once per process, such as by importing their library."""
