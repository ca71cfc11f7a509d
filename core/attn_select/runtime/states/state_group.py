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
from attn_select.runtime.checks import checks_enabled
from attn_select.runtime.integers import size
from attn_select.runtime.loaded_backend import device_of
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.states.state_backend import StateBackend, StateContext, StateImpl
from attn_select.runtime.states.state_batch import StateMetadata, build_states
from attn_select.runtime.states.state_cache import StateCache, allocate_states, zeros_slot
from attn_select.runtime.states.state_checks import StateChecks
from attn_select.runtime.states.state_pool import StateSlots


@dataclass(frozen=True, slots=True)
class LoadedStates:
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
        checked: whether batches and tensors are read back and checked; None: as ``ATTN_SELECT_CHECK`` says.

    Attributes:
        selection, config, device, cuda_graphs: as given.
        backends: what runs each phase.
        checks: compares steps and calls with the group.

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
        checked: bool | None = None,
    ) -> None:
        if not isinstance(selection, Selection) or not isinstance(selection.config, StateConfig):
            text = f"selection = {show(selection)}: accepted is what attn_select.select returns for a StateConfig"
            raise ConfigError(text, fields=["selection"])
        selection.require()
        assert selection.kv_layout is not None
        self.selection, self.config = selection, selection.config
        self.device, self.cuda_graphs = device_of(selection, device), cuda_graphs
        self._layout = selection.kv_layout
        specs = {spec.name: spec for spec in selection.backends.values() if spec is not None}
        self.backends: dict[Phase, LoadedStates] = {}
        for name, plans in selection.plans_by_backend(phases).items():
            made = self._load(specs[name], plans)
            self.backends.update(dict.fromkeys(plans, made))
        on = checks_enabled() if checked is None else checked
        self.checks = StateChecks(self.config, self._layout, self.device, on, self.extra_slots)

    def _load(self, spec: BackendSpec, plans: Mapping[Phase, BackendPlan]) -> LoadedStates:
        backend: type[StateBackend] = load_backend(spec, StateBackend, impl_cls=(StateImpl,))
        context = StateContext(
            config=self.config,
            plans=plans,
            device=self.device,
            options=self.selection.options[spec.name],
            state_layout=self._layout,
        )
        return LoadedStates(spec, backend, context)

    @property
    def checked(self) -> bool:
        """Whether batches and tensors are read back and checked."""
        return self.checks.checked

    @property
    def num_slots(self) -> int | None:
        """Slots of each layer's states that requests may have; None before the first ``allocate`` or ``adopt``."""
        return self.checks.num_slots

    @property
    def cudagraph_support(self) -> CudaGraphLevel:
        """Which batches can be captured: decodes at most."""
        backend = self.backends.get("decode")
        level = "NEVER" if backend is None else backend.context.plans["decode"].cuda_graph
        return "UNIFORM_BATCH" if level == "ALWAYS" else level

    @property
    def reads_zeros(self) -> bool:
        """Whether a backend reads a slot of zeros for requests that start from zero."""
        return any(own.backend.reads_zeros for own in self.backends.values())

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
        count = size("num_slots", num_slots) + self.extra_slots
        return self.adopt(allocate_states(self.config, self._layout, count, self.device))

    def adopt(self, cache: StateCache) -> StateCache:
        """Take memory of the caller's as the states of one layer, and return it.

        Args:
            cache: in the selection's layout, with ``extra_slots`` slots behind the requests' ones. Slots may lie apart.

        Raises:
            ConfigError: it has another number of slots than the group's other layers, or none for requests.
            BatchError: a tensor has another shape, dtype or device, or numbers of a slot lie apart.
        """
        found = cache.state.shape[0] - self.extra_slots
        if found < 1 or self.num_slots not in (None, found):
            wanted = "integers from 1" if self.num_slots is None else f"the group's other layers have {self.num_slots}"
            raise ConfigError(f"num_slots = {found}: {wanted}", fields=["num_slots"])
        before, self.checks.num_slots = self.num_slots, found
        try:
            self.checks.cache(cache)
        except BatchError:
            self.checks.num_slots = before
            raise
        if self.reads_zeros:
            cache.state[zeros_slot(cache.state)].zero_()
        return cache

    def build(self, common: CommonAttentionMetadata, slots: StateSlots) -> StateMetadata:
        """Return the metadata of a step, and commit it in its pool; no device is asked.

        Where the batch is refused, the pool keeps the states that the requests had: build it again, or plan another
        step. Groups that share a pool build the same slots. In a hybrid model build the groups of attention first: what
        they refuse is not committed then.

        Args:
            common: the batch, decodes first: queries of up to ``config.max_decode_query_len`` tokens.
            slots: what ``StatePool.step`` returned for its requests, in the same order.

        Raises:
            BatchError: the slots do not fit the batch or the group's states, the batch has other numbers of tokens than
                the pool's step, or a decode stands behind a prefill; in checked mode also: lengths differ between
                device and host, or from the tokens that a state has seen.
            PoolError: the step was taken back since, or a later one was built.
        """
        with self.checks.step(common, slots, seen=True):
            made = build_states(self, self.config, common, slots, self.device)
            for phase, part in made.parts:
                if phase not in self.backends:
                    text = f"{part.num_reqs} requests are in {phase}: the group serves {' and '.join(self.backends)}"
                    raise BatchError(text, hint="StateGroup(selection, phases=…)")
        return made
