"""What is checked of a step and of a call of layers that keep a state: shapes and owners always, contents in checked
mode.

Checked mode (``attn_select.runtime.checks``) also keeps a book of each cache: which state a layer wrote last into each
slot. A step says which states it reads (``PlannedStep.read_stamps``), so a slot that holds another one is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from attn_select.errors import AttnSelectError, show
from attn_select.layer.config import Phase
from attn_select.layer.state import StateConfig
from attn_select.runtime import checks
from attn_select.runtime.metadata import BatchError, CommonAttentionMetadata
from attn_select.runtime.overlaps import check_no_self_overlap, check_overlaps
from attn_select.runtime.states.gates import Gates
from attn_select.runtime.states.state_batch import StateMetadata, check_slots
from attn_select.runtime.states.state_cache import StateCache, slot_kinds
from attn_select.runtime.states.state_pool import FROM_ZERO, StateSlots
from attn_select.runtime.torch_dtypes import PLAIN_DTYPES


class StateChecks:
    """Checks the steps and calls of one group; ``checked``: contents too, which synchronises with the device."""

    def __init__(self, config: StateConfig, layout: str, device: torch.device, checked: bool, extra_slots: int) -> None:
        self.config, self.device, self.checked = config, device, checked
        # Slots of each layer's states that requests may have; None before the first ``allocate``. Extra ones lie
        # behind them.
        self.num_slots: int | None = None
        self.extra_slots = extra_slots
        self._layout = layout
        # Per cache and slot, the stamp of the step that wrote it last (checked mode).
        self._books: dict[tuple[int, int], dict[int, int]] = {}

    @contextmanager
    def step(self, common: CommonAttentionMetadata, slots: StateSlots, *, seen: bool) -> Iterator[None]:
        """Compare a step's slots with its batch, run the body, and commit the step; or mark it as refused."""
        # ``seen``: ``wrote`` will see the states that layers write. Raises BatchError where slots or lengths do not
        # fit, PoolError where the pool has taken the step back since, or a later one was built.
        for name, given, kind in (("common", common, CommonAttentionMetadata), ("slots", slots, StateSlots)):
            if not isinstance(given, kind):
                raise BatchError(f"{name} is a {type(given).__name__}: accepted is a {kind.__name__}")
        planned = slots.planned
        try:
            self._batch(common, slots)
            yield
            if planned is not None:
                planned.pool.commit(slots, stamped=seen)
                planned.refused = False
        except AttnSelectError:
            if planned is not None:
                planned.refused = True
            raise

    def _batch(self, common: CommonAttentionMetadata, slots: StateSlots) -> None:
        if self.num_slots is None:
            raise BatchError("the group's layers have no states yet", hint="group.allocate(num_slots) per layer first")
        checks.check_lengths(common)
        check_slots(self.config, common, slots, self.num_slots)
        planned = slots.planned
        if planned is not None:
            if (pool_slots := planned.pool.num_slots) > self.num_slots:
                text = f"the slots are of a pool of {pool_slots}: the group's layers have {self.num_slots} slots"
                raise BatchError(text, hint="StatePool(group.num_slots)")
            what = "has {} tokens in the batch, and {} by the pool's step"
            _check_same(what, [*planned.num_tokens.values()], common.query_lens_cpu)
        if not self.checked:
            return
        checks.check_copies(common, self.device)
        if planned is not None:
            what = "had {} tokens before this step by seq_lens, and its state has seen {} by the pool"
            _check_same(what, planned.before, common.num_computed_tokens_cpu)

    def cache(self, cache: StateCache) -> None:
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

    def contents(
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
                _check_decays(numbers, common)
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
        if slots is None or slots.planned is None:
            return
        book = self._books.get(_key(cache), {})
        for request, (slot, stamp) in enumerate(zip(slots.read, slots.planned.read_stamps, strict=True)):
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
        stamp = 0 if slots.planned is None else slots.planned.stamp
        book.update((slot, stamp) for writes in slots.write for slot in writes)


def _check_same(what: str, planned: list[int], found: Tensor) -> None:
    """Compare a number of each request's, on the host, with the pool's."""
    if (seen := found.tolist()) != planned:
        request = next(i for i, pair in enumerate(zip(seen, planned, strict=True)) if pair[0] != pair[1])
        text = what.format(seen[request], planned[request])
        raise BatchError(f"request {request} {text} (accepted: the same)")


def check_weight(name: str, tensor: Tensor, device: torch.device, checked: bool) -> None:
    """Check the dtype and device of a layer's weight, and in checked mode that its numbers are finite."""
    if tensor.dtype not in PLAIN_DTYPES.values() or tensor.device != device:
        accepted = ", ".join(PLAIN_DTYPES)
        raise BatchError(f"{name} is {tensor.dtype} on {tensor.device}: accepted are {accepted} on {device}")
    if checked and not bool(tensor.isfinite().all()):
        raise BatchError(f"{name} holds NaN or infinity: accepted are finite numbers")


def _check_decays(log_decay: Tensor, common: CommonAttentionMetadata) -> None:
    """Refuse a log-decay that is NaN or positive; minus infinity forgets everything."""
    rows = log_decay[: int(common.query_start_loc_cpu[-1])].flatten(1)
    wrong = ~(rows <= 0).all(dim=1)
    if bool(wrong.any()):
        token = int(wrong.int().argmax())
        request = int(torch.searchsorted(common.query_start_loc_cpu[1:], token, right=True))
        value = float(rows[token][~(rows[token] <= 0)][0])
        raise BatchError(f"log_decay[{token}] = {value} (of request {request}): accepted are numbers up to 0")


def _key(cache: StateCache) -> tuple[int, int]:
    """Return where a cache's memory begins, by which its book is found."""
    return cache.state.data_ptr(), 0 if cache.conv is None else cache.conv.data_ptr()
