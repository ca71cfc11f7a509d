"""FlashInfer without a GPU: the same signatures and rules, computed by the float64 oracle on the CPU.

This module holds what the entries share: the emulated device, its hazards, the cache, the masks. Each entry is emulated
once, in the modules beside this one, and ``library()`` puts them into the plugin's dataclass.
``test_flashinfer_signatures`` compares their signatures with what is installed. The rules are those of
flashinfer/{prefill,decode,cascade,xqa}.py and of csrc and include at tag v0.6.14; ``mla07`` has what 0.7 changed.
Where a kernel would read out of bounds, wait forever or be silently wrong, these raise ``Misuse``; where the library
raises, they raise what it raises.

What only a GPU shows is made visible here:

- *Waiting.* ``on_device(tensors)`` marks what would live on a GPU. ``world.syncs`` lists every marked argument that
  ``plan`` copies to the host (the host waits for the GPU there).
- *Late copies.* In ``lagging()`` copies from the host and kernels wait for ``finish()`` (an ``Event`` calls it). What
  arrives is what the host's memory holds then: a list changed too early arrives changed, and where the same wrapper was
  planned again, the kernels find the later schedule, which is ``Misuse``.
- *Graphs.* In ``capturing()`` kernels are recorded with what a graph would bake in, and not run; ``Graph.replay()``
  runs them with the contents that the buffers have then.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_select.reference.oracle import attention_reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = (E4M3, E5M2)
HALVES = (torch.float16, torch.bfloat16)
LOG2E = 1.0 / math.log(2.0)
NEGATIVE = -5e4
"""``math::inf`` of FlashInfer is 5e4: the LSE of a row without keys, base 2 (include/flashinfer/math.cuh)."""
SEMAPHORES = 8 << 20
"""First bytes of XQA's and trtllm-gen's workspace: counters that must be zero before a decode and are after it."""


class Misuse(AssertionError):
    """The real kernel would be silently wrong, read out of bounds or hang."""


def need(condition: Any, message: str, error: type[Exception] = Misuse) -> None:
    if not condition:
        raise error(message)


@dataclass
class World:
    """The emulated device and what happened on it.

    Attributes:
        capability: of the device; ``auto`` backends follow it.
        calls: one per call of an entry: its name under ``entry``, and its arguments.
        syncs: ``entry.argument`` for every tensor of the device that was copied to the host.
        device: storages marked by ``on_device``.
        lagging: whether copies stay in flight until ``finish()``.
        flights: copies and kernels that the GPU has not come to yet, in order.
        memory: by address, what plans wrote into pinned buffers and what arrived on the device.
        graph: what is being captured.
    """

    capability: tuple[int, int] = (9, 0)
    calls: list[dict[str, Any]] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)
    device: set[int] = field(default_factory=set)
    lagging: bool = False
    flights: list[Callable[[], Any]] = field(default_factory=list)
    memory: dict[int, Any] = field(default_factory=dict)
    graph: Graph | None = None

    def named(self, *entries: str) -> list[dict[str, Any]]:
        """Return the calls of these entries, e.g. ``BatchPrefillWithPagedKVCacheWrapper.plan``."""
        return [call for call in self.calls if call["entry"] in entries]


class Graph:
    """What a CUDA graph would hold: calls with baked arguments, run again by ``replay``."""

    def __init__(self) -> None:
        self.nodes: list[Callable[[], None]] = []

    def replay(self) -> None:
        finish()
        for node in self.nodes:
            node()


world = World()


def reset(capability: tuple[int, int] = (9, 0)) -> World:
    """Start over on a device of this compute capability."""
    world.__init__(capability=capability)  # type: ignore[misc]
    return world


def on_device(*tensors: Tensor | None) -> None:
    """Mark tensors (with all that share their storage) as the GPU's."""
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            world.device.add(tensor.untyped_storage().data_ptr())


def is_on_device(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in world.device


def to_host(tensor: Tensor, label: str) -> Tensor:
    """Return ``tensor.to("cpu")``; where the tensor is the GPU's, the host waits."""
    if is_on_device(tensor):
        world.syncs.append(label)
    return tensor.clone()


def to_device(tensor: Tensor) -> Tensor:
    """Return ``tensor.to(device, non_blocking=True)``: itself if it is there, else a copy that may arrive later."""
    if is_on_device(tensor):
        return tensor
    arrived = torch.empty_like(tensor)
    copy_late(arrived, tensor)
    return arrived


def copy_late(target: Tensor, source: Tensor) -> None:
    """Copy without waiting. What arrives from the host is what the source holds when the copy is made."""
    if is_on_device(source):
        target.copy_(source)
    else:
        stream(lambda: target.copy_(source))


def stream(work: Callable[[], Any]) -> None:
    """Do what is put on the GPU's stream, now or when it gets there."""
    if world.lagging:
        world.flights.append(work)
    else:
        work()


@contextmanager
def lagging() -> Iterator[None]:
    """Let the GPU run behind until ``finish()``, at the latest at the end."""
    world.lagging = True
    try:
        yield
        finish()
    finally:
        world.lagging = False
        world.flights.clear()


def finish() -> None:
    """Let the GPU catch up with the host."""
    flights, world.flights = world.flights, []
    for end in flights:
        end()


class Event:
    """Stands in for ``torch.cuda.Event``: waiting for one lets the GPU catch up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return not world.flights

    def synchronize(self) -> None:
        finish()


@contextmanager
def capturing() -> Iterator[Graph]:
    """Record what a CUDA graph would hold."""
    world.graph = Graph()
    try:
        yield world.graph
    finally:
        world.graph = None


def launch(node: Callable[[], None]) -> None:
    """Run a kernel, or queue it, or record it."""
    if world.graph is not None:
        world.graph.nodes.append(node)
    else:
        stream(node)


def moment(tensor: Tensor) -> Tensor:
    """Return what a kernel that is launched now will find there: torch's own operations do not lag here."""
    return tensor.clone() if world.lagging else tensor


def check_mask(scale: float) -> None:
    """A hidden key has the raw score ``NEGATIVE``: with a small factor behind it, it would get weight."""
    need(-NEGATIVE * scale > 60, f"scores are multiplied by {scale}: hidden keys are {-NEGATIVE * scale:.2g} nats away")


RELEASES = ("0.6.14", "0.7.2.post1")
"""Emulated releases. The others between them take the same calls as one of these."""
FOLDER = Path(__file__).parents[1] / "signatures"
READ = {release: json.loads((FOLDER / f"{release}.json").read_text(encoding="utf-8")) for release in RELEASES}
"""What ``make_signatures`` read from the wheels."""


def called(entry: str, arguments: dict[str, Any]) -> None:
    """Take a call down. ``arguments`` are the caller's ``locals()``."""
    world.calls.append({"entry": entry, **{name: value for name, value in arguments.items() if name != "self"}})


def entry(label: str, since: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a function the signature of an entry; it gets the arguments in a namespace.

    ``since``: the release, if not the first. Such a function takes its calls down itself, or hands them on.
    """
    name = label.split(".", 1)[1]
    kinds = {"*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.KEYWORD_ONLY}
    parameters = []
    for parameter, default in READ[since or RELEASES[0]]["signatures"][label]:
        own = parameter.lstrip("*")
        kind = kinds.get(parameter[: len(parameter) - len(own)], inspect.Parameter.POSITIONAL_OR_KEYWORD)
        value = inspect.Parameter.empty if default is None else eval(default)
        parameters.append(inspect.Parameter(own, kind, default=value))
    signature = inspect.Signature(parameters)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def passed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            own = {parameter: value for parameter, value in bound.arguments.items() if parameter != "self"}
            if not since:
                called(name, own)
            return function(*args[: name.count(".")], SimpleNamespace(**own))

        passed.__signature__ = signature  # type: ignore[attr-defined]
        return passed

    return decorate


def check_tensor(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> None:
    """FlashInfer's ``check_shape_dtype_device``."""
    need(
        tuple(tensor.shape) == tuple(shape), f"Invalid shape of {name}: {tuple(tensor.shape)}, not {shape}", ValueError
    )
    need(tensor.dtype == dtype, f"Invalid dtype of {name}: {tensor.dtype}, not {dtype}", ValueError)


def check_list(tensor: Tensor, length: int, name: str) -> None:
    """Index lists are int32 and contiguous: the kernels read them through a bare pointer."""
    need(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}: the kernels read int32")
    need(tensor.ndim == 1 and tensor.is_contiguous(), f"{name} has strides {tensor.stride()}")
    need(len(tensor) == length, f"{name} has {len(tensor)} entries, not {length}")


def check_indptr(indptr: Tensor, name: str) -> list[int]:
    values: list[int] = indptr.tolist()
    need(values[0] == 0, f"{name} begins with {values[0]}")
    for before, after in pairwise(values):
        need(after >= before, f"{name}: {after} - {before} should be non-negative", RuntimeError)
    return values


def unpack(cache: Any, layout: str) -> tuple[Tensor, Tensor]:
    """Return K and V, each in four dimensions (``_unpack_paged_kv_cache``)."""
    if isinstance(cache, tuple):
        pair = cache
    else:
        need(torch.is_tensor(cache), f"Unrecognized paged_kv_cache type {type(cache)}", KeyError)
        need(cache.ndim in (4, 5), "x must be 4D or 5D", ValueError)
        pair = cache.unbind(dim=1)
    dim = -3 if layout == "NHD" else -2
    k, v = (half if half.ndim == 4 else half.unsqueeze(dim) for half in pair)
    return k, v


def check_cache(k: Tensor, v: Tensor, every_stride: bool) -> None:
    """K and V are read with one set of strides, and rows of the last dimension as a whole."""
    need(k.shape == v.shape and k.dtype == v.dtype, f"K {tuple(k.shape)} {k.dtype}, V {tuple(v.shape)} {v.dtype}")
    need(k.stride(-1) == v.stride(-1) == 1, "the last dimension must be contiguous")
    dims = range(k.ndim) if every_stride else (0, 1)
    for dim in dims:
        need(k.stride(dim) == v.stride(dim), f"k/v strides differs at {dim}", RuntimeError)
    need(k.dtype != torch.uint8, "nvfp4 is not emulated")


def gather(half: Tensor, pages: Sequence[int], length: int, layout: str) -> Tensor:
    """Return ``(length, heads, size)`` of one request, reading no other page and nothing behind its end."""
    need(all(0 <= page < len(half) for page in pages), f"pages {list(pages)} of {len(half)}: out of bounds")
    chosen = half.view(torch.uint8) if half.dtype in FP8 else half
    chosen = chosen[torch.tensor(list(pages), dtype=torch.int64)]
    chosen = chosen.view(half.dtype) if half.dtype in FP8 else chosen
    if layout == "HND":
        chosen = chosen.transpose(1, 2)
    return chosen.flatten(0, 1)[:length] if len(pages) else chosen.reshape(0, *chosen.shape[2:])


def nan_behind(half: Tensor, pages: Sequence[int], length: int, layout: str) -> float:
    """Return what a kernel adds that reads whole pages: what lies behind the end counts 0 times, and 0 * NaN is NaN."""
    size = half.shape[1 if layout == "NHD" else 2]
    tail = gather(half, pages, len(pages) * size, layout)[length:].double()
    return float((0.0 * tail).sum())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool,
    window_left: int = -1,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend one request's rows to its keys by the oracle.

    Args:
        window_left: keys before a row's own that it sees; -1 for all. Without causality it hides nothing after the row.
        visible: bool ``(rows, keys)`` instead of causality.

    Returns:
        Output and LSE in float64, the LSE in base 2 and ``NEGATIVE`` where there is no key and no sink.
    """
    options: dict[str, Any] = {"scale": scale, "sinks": sinks, "logits_soft_cap": soft_cap or None}
    rows, keys = len(q), len(k)
    if visible is None and (causal or window_left < 0):
        window = window_left + 1 if window_left >= 0 else None
        out, lse = attention_reference(q.double(), k, v, causal=causal, sliding_window=window, **options)
    else:
        out, lse = (
            q.new_empty(rows, q.shape[1], v.shape[-1], dtype=torch.float64),
            torch.empty(rows, q.shape[1]).double(),
        )
        for row in range(rows):
            seen = torch.ones(keys, dtype=torch.bool) if visible is None else visible[row]
            if window_left >= 0:
                seen = seen & (torch.arange(keys) >= keys - rows + row - window_left)
            keys_seen, values_seen = k.double()[seen], v.double()[seen]
            part = attention_reference(q[row : row + 1].double(), keys_seen, values_seen, causal=False, **options)
            out[row], lse[row] = part[0][0], part[1][0]
    return out, torch.where(lse.isneginf(), NEGATIVE, lse * LOG2E)


def scribble(buffer: Tensor, start: int = 0, size: int = 64) -> None:
    """Write what a kernel leaves in its scratch."""
    buffer.view(torch.uint8)[start : start + size] = 0xA5


def check_semaphores(workspace: Tensor) -> None:
    """Decode's counters are zero before a call; the kernels leave them at zero."""
    need(workspace.is_contiguous(), "the workspace is contiguous")
    counters = workspace.view(torch.uint8)[:SEMAPHORES]
    need(counters.numel() == SEMAPHORES, f"a workspace of {counters.numel()} bytes: the first 8 MiB are counters")
    need(
        not bool(counters.view(torch.int64).any()),
        "the counters are not zero: not zeroed, or shared with other scratch",
    )


def entries(release: str = "0.6.14") -> dict[str, Any]:
    """Return every emulated entry of a release by its name."""
    from flashinfer_emulated import functions, mla06, mla07, paged, paged07, ragged, states, trtllm, trtllm_mla

    of_release = (mla07, paged07) if release == RELEASES[1] else (mla06,)
    modules = (paged, ragged, *of_release, states, trtllm, trtllm_mla, functions)
    return {name: entry for module in modules for name, entry in vars(module).items()}


def library(release: str = "0.6.14", **others: Any) -> Any:
    """Return the plugin's class with the entries of a release; ``others`` replace or add entries."""
    from attn_select_flashinfer.runtime.library import METADATA, SINKS, FlashInfer

    known = {SINKS: SINK_DECLARATIONS, METADATA: None, **entries(release), **others}
    return FlashInfer(known.__getitem__)


SINK_DECLARATIONS = {"fa2": "struct AttentionSink {};  // fa2", "fa3": "struct AttentionSink {};  // fa3"}
"""Stands in for ``flashinfer.attention._core.attention_sink_decl``."""
