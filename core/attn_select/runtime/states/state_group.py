"""``StateGroup``: the layers of one kind that keep a state, and what they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.selection import Selection
from attn_select.errors import ConfigError, show
from attn_select.layer.config import CudaGraphLevel, Phase
from attn_select.layer.state import StateConfig
from attn_select.runtime.backend_faults import load_backend
from attn_select.runtime.loaded import device_of
from attn_select.runtime.metadata import CommonAttentionMetadata
from attn_select.runtime.states.state_backend import StateBackend, StateContext, StateImpl
from attn_select.runtime.states.state_batch import StateMetadata, build_states
from attn_select.runtime.states.state_cache import StateCache, allocate_states, zeros_slot
from attn_select.runtime.states.state_pool import StateSlots


@dataclass(frozen=True, slots=True)
class ServedStates:
    """A backend that runs one or more phases of a group, and what it was made for."""

    spec: BackendSpec
    backend: type[StateBackend]
    context: StateContext


class StateGroup:
    """Loads the backends of a selection, allocates states and builds the metadata that its layers share.

    Args:
        selection: of a ``StateConfig``.
        device: where the layers run; None: the device of the selection.
        cuda_graphs: whether steps will be captured (``CudaGraphRunner``).
        phases: the phases that the group serves; None: all.

    Attributes:
        selection, config, device, cuda_graphs: as given.
        served: what runs each phase.
        num_slots: slots of each layer's states; None before the first ``allocate``.

    Raises:
        ConfigError: ``selection`` is none of a ``StateConfig``, or it is for another device.
        NoBackendError: a phase has no backend.
        RuntimeMissingError, ImportError: a backend cannot be loaded.
        PluginError, BackendError: its classes are not what the runtime calls, or raise something.
    """

    def __init__(
        self,
        selection: Selection[StateConfig],
        device: torch.device | str | None = None,
        *,
        cuda_graphs: bool = False,
        phases: Sequence[Phase] | None = None,
    ) -> None:
        if not isinstance(selection, Selection) or not isinstance(selection.config, StateConfig):
            text = f"selection = {show(selection)}: accepted is what attn_select.select returns for a StateConfig"
            raise ConfigError(text, fields=["selection"])
        selection.require()
        assert selection.kv_layout is not None
        self.selection, self.config = selection, selection.config
        self.device, self.cuda_graphs = device_of(selection, device), cuda_graphs
        self._layout = selection.kv_layout
        self.num_slots: int | None = None
        specs = {spec.name: spec for spec in selection.backends.values() if spec is not None}
        self.served: dict[Phase, ServedStates] = {}
        for name, plans in selection.plans_by_backend(phases).items():
            made = self._serve(specs[name], plans)
            self.served.update(dict.fromkeys(plans, made))

    def _serve(self, spec: BackendSpec, plans: Mapping[Phase, BackendPlan]) -> ServedStates:
        backend: type[StateBackend] = load_backend(spec, StateBackend, impl_cls=(StateImpl,))
        context = StateContext(
            config=self.config,
            plans=plans,
            device=self.device,
            options=self.selection.options[spec.name],
            state_layout=self._layout,
        )
        return ServedStates(spec, backend, context)

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Which batches can be captured: decodes at most."""
        served = self.served.get("decode")
        level = "NEVER" if served is None else served.context.plans["decode"].cuda_graph
        return "UNIFORM_BATCH" if level == "ALWAYS" else level

    @property
    def reads_zeros(self) -> bool:
        """Whether a backend reads a slot of zeros for requests that start from zero."""
        return any(served.backend.reads_zeros for served in self.served.values())

    @property
    def extra_slots(self) -> int:
        """How many slots ``allocate`` adds behind the requests' slots."""
        return 2 if self.reads_zeros else int(self.cuda_graphs)

    def allocate(self, num_slots: int) -> StateCache:
        """Return uninitialised states of one layer, in the selection's layout. All layers have as many slots.

        With ``cuda_graphs`` there is one slot more, to which the padding of captured steps writes. Where a backend
        ``reads_zeros`` there are two more, of which the first holds zeros.

        Raises:
            ConfigError: ``num_slots`` is out of range, or another number than before.
        """
        if type(num_slots) is not int or num_slots < 1:
            raise ConfigError(f"num_slots = {show(num_slots)}: accepted are integers from 1", fields=["num_slots"])
        if self.num_slots not in (None, num_slots):
            text = f"num_slots = {show(num_slots)}: the group's other layers have {self.num_slots}"
            raise ConfigError(text, fields=["num_slots"])
        made = allocate_states(self.config, self._layout, num_slots + self.extra_slots, self.device)
        if self.reads_zeros:
            made.state[zeros_slot(made.state)].zero_()
        self.num_slots = num_slots
        return made

    def build(self, common: CommonAttentionMetadata, slots: StateSlots) -> StateMetadata:
        """Return the metadata of a step; no device is asked.

        Args:
            common: the batch, decodes first: queries of up to ``config.max_decode_query_len`` tokens.
            slots: what ``StatePool.step`` returned for its requests, in the same order.

        Raises:
            BatchError: the slots do not fit the batch, or a decode stands behind a prefill.
        """
        return build_states(self.config, common, slots, self.num_slots, self.device)
