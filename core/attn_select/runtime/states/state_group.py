"""``StateGroup``: the layers of one kind that keep a state, and what they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from attn_select.backends.spec import BackendPlan, BackendSpec
from attn_select.decide.selection import Selection
from attn_select.errors import AttnSelectError, ConfigError, show
from attn_select.layer.config import CudaGraphLevel, Phase
from attn_select.layer.state import StateConfig
from attn_select.runtime import checks
from attn_select.runtime.backend_faults import load_backend
from attn_select.runtime.integers import size
from attn_select.runtime.loaded_backend import Loaded, device_of
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.overlaps import check_no_self_overlap, check_overlaps
from attn_select.runtime.states.gates import Gates
from attn_select.runtime.states.state_backend import StateBackend, StateContext, StateImpl
from attn_select.runtime.states.state_batch import StateMetadata, build_states
from attn_select.runtime.states.state_cache import StateCache, allocate_states, slot_kinds, zeros_slot
from attn_select.runtime.states.state_checks import check_decays, check_same, check_step, check_weight
from attn_select.runtime.states.state_pool import FROM_ZERO, StateSlots

LoadedStates = Loaded[StateBackend, StateContext]
MOST_EXTRA_SLOTS = 2  # One of zeros, and one that padding writes to


class StateGroup:
    """Loads the backends of a selection, allocates states and builds the metadata that its layers share.

    Args:
        selection: of a ``StateConfig``.
        device: where the layers run; None: the device of the selection.
        cuda_graphs: whether steps will be captured (``CudaGraphRunner``).
        phases: the phases that the group serves; None: all.

    Attributes:
        selection, config, device, cuda_graphs: as given.
        backends: what runs each phase.
        checked: whether batches and tensors are read back and checked, as ``ATTN_SELECT_CHECK`` says.
        num_slots: slots of each layer's states that requests may have; None before the first ``allocate`` or ``adopt``.

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
        specs = {spec.name: spec for spec in selection.backends.values() if spec is not None}
        self.backends: dict[Phase, LoadedStates] = {}
        for name, plans in selection.plans_by_backend(phases).items():
            made = self._load(specs[name], plans)
            self.backends.update(dict.fromkeys(plans, made))
        self.checked = checks.checks_enabled()
        # Per cache and slot, the stamp of the step whose state a layer wrote there last (checked mode). A step says
        # which states it reads (``StateSlots.read_stamps``), so a slot that holds another one is named.
        self._books: dict[tuple[int, int], dict[int, int]] = {}
        self.num_slots: int | None = None

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

    def __deepcopy__(self, memo: object) -> StateGroup:
        """As ``LayerGroup.__deepcopy__``."""
        return self

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
        return MOST_EXTRA_SLOTS if self.reads_zeros else int(self.cuda_graphs)

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
        before, self.num_slots = self.num_slots, found
        try:
            self.check_cache(cache)
        except BatchError:
            self.num_slots = before
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
        with self.checked_step(common, slots, seen=True):
            made = build_states(self, self.config, common, slots, self.device)
            for phase, part in made.parts:
                if phase not in self.backends:
                    text = f"{part.num_reqs} requests are in {phase}: the group serves {' and '.join(self.backends)}"
                    raise BatchError(text, hint="StateGroup(selection, phases=…)")
        return made

    @contextmanager
    def checked_step(self, common: CommonAttentionMetadata, slots: StateSlots, *, seen: bool) -> Iterator[None]:
        """Compare a step's slots with its batch, run the body, and commit the step; or mark it as refused."""
        # ``seen``: ``wrote`` will see the states that layers write. Raises BatchError where slots or lengths do not
        # fit, PoolError where the pool has taken the step back since, or a later one was built.
        for name, given, kind in (("common", common, CommonAttentionMetadata), ("slots", slots, StateSlots)):
            if not isinstance(given, kind):
                raise BatchError(f"{name} is a {type(given).__name__}: accepted is a {kind.__name__}")
        try:
            self._check_batch(common, slots)
            yield
            slots.pool.commit(slots, stamped=seen)
            slots.refused = False
        except AttnSelectError:
            slots.refused = True
            raise

    def _check_batch(self, common: CommonAttentionMetadata, slots: StateSlots) -> None:
        if self.num_slots is None:
            raise BatchError("the group's layers have no states yet", hint="group.allocate(num_slots) per layer first")
        checks.check_lengths(common)
        check_step(self.config, common, slots, self.num_slots)
        if self.checked:
            checks.check_copies(common, self.device)
            what = "had {} tokens before this step by seq_lens, and its state has seen {} by the pool"
            check_same(what, slots.before, common.num_computed_tokens_cpu)

    def check_cache(self, cache: StateCache) -> None:
        """Check one layer's states: shape, dtype, device, and that a slot's numbers lie side by side. Cheap."""
        if not isinstance(cache, StateCache):
            raise BatchError(f"cache is a {type(cache).__name__}: accepted is a StateCache", hint="group.allocate")
        assert self.num_slots is not None
        count = self.num_slots + self.extra_slots
        for name, kind in slot_kinds(self.config, self._layout).items():
            tensor = getattr(cache, name)
            if kind is None:
                if tensor is not None:
                    raise BatchError(f"cache.{name} is a tensor: accepted is None, the layers have no convolution")
                continue
            shape, dtype = (count, *kind[0]), kind[1]
            wanted = f"{dtype} {shape} on {self.device}"
            if not isinstance(tensor, Tensor):
                raise BatchError(f"cache.{name} is {show(tensor)}: accepted is {wanted}", hint="group.allocate")
            if (tensor.dtype, tuple(tensor.shape), tensor.device) != (dtype, shape, self.device):
                text = f"cache.{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: accepted is {wanted}"
                raise BatchError(text, hint="allocate it with group.allocate, or group.adopt memory of your own")
            if not tensor[:1].is_contiguous() or tensor.stride(0) < tensor[0].numel():
                text = f"cache.{name} has strides {tensor.stride()}: accepted are slots of numbers side by side"
                raise BatchError(text)

    def check_contents(
        self,
        tensors: Mapping[str, Tensor | None],
        gates: Gates,
        weights: Mapping[str, Tensor | None],
        cache: StateCache,
        metadata: StateMetadata,
        least_log_decay: Mapping[Phase, tuple[float, str]],
    ) -> None:
        """Check everything about one layer's call that must be read back or costs time (checked mode). Synchronises."""
        # The states are not yet written. Metadata at fixed addresses, for graphs, says nothing of requests: it is not
        # checked.
        common = metadata.common
        if common is None:
            return
        for name, tensor in weights.items():
            if tensor is not None:
                check_weight(name, tensor, self.device, self.checked)
        channels, output = tensors["channels"], tensors["output"]
        assert channels is not None
        checks.check_finite("channels", channels, common, of_requests=True)
        for name, numbers in gates.given().items():
            if name in ("A_log", "dt_bias"):
                if not bool(numbers.isfinite().all()):
                    raise BatchError(f"{name} holds NaN or infinity: accepted are finite numbers")
            elif name == "log_decay":
                check_decays(numbers, common)
            else:
                checks.check_finite(name, numbers, common, of_requests=True)
        for phase, part in metadata.parts:
            least, kernel = least_log_decay.get(phase, (-torch.inf, ""))
            rows = slice(part.first_token, part.first_token + part.num_tokens)
            if least > -torch.inf and bool((found := gates.rows(rows).log_decay).lt(least).any()):
                raise BatchError(
                    f"log_decay of {float(found.min()):.4g} in {phase}: {kernel} loses digits below {least:g}",
                    hint=f"another backend for {phase}",
                )
        if output is not None:
            given = {"channels": channels, "cache.state": cache.state, "cache.conv": cache.conv, **gates.given()}
            check_no_self_overlap("output", output)
            check_overlaps({"output": output}, given)
        self._book(cache, metadata)

    def _book(self, cache: StateCache, metadata: StateMetadata) -> None:
        slots = metadata.slots
        if slots is None:
            return
        book = self._books.get(_key(cache), {})
        for request, (slot, stamp) in enumerate(zip(slots.read, slots.read_stamps, strict=True)):
            # A stamp of 0 is of states that no layer wrote where checked mode saw it: any state may be there.
            if slot != FROM_ZERO and stamp and book.get(slot, 0) != stamp:
                owner = "another step's" if slot in book else "none that a layer wrote"
                raise BatchError(
                    f"request {request} reads slot {slot}, whose state in this cache is {owner}: accepted is the state "
                    "that its last step wrote there",
                    hint="run each step once per layer, on the layer's own cache; pool.commit after states were "
                    "copied into a step's slots",
                )

    def wrote(self, cache: StateCache, metadata: StateMetadata) -> None:
        """Note what a layer has written (checked mode)."""
        slots = metadata.slots
        if slots is None:
            return
        book = self._books.setdefault(_key(cache), {})
        book.update((slot, slots.stamp) for writes in slots.write for slot in writes)


def _key(cache: StateCache) -> tuple[int, int]:
    """Return where a cache's memory begins, by which its book is found."""
    return cache.state.data_ptr(), 0 if cache.conv is None else cache.conv.data_ptr()
