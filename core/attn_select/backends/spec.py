"""What a plugin registers for one backend: facts as data, importing nothing heavy.

A spec answers every question that can be asked without running a kernel. ``Capabilities`` holds what a
plain comparison can decide; ``BackendSpec.plan`` decides the rest (which inner path, and why). The gate
(``attn_select.decide.gate``) compares both with a config and returns every ``Reason`` against it.

Specs are shared and cached: what a mapping in them holds must not be changed either.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, final

from pydantic import BaseModel, ConfigDict

from attn_select.errors import AttnSelectError, BackendError, PluginError, RuntimeMissingError, shorten, show
from attn_select.layer.config import CudaGraphLevel, Phase, Sort
from attn_select.layer.features import MOST_SPECULATIVE_TOKENS
from attn_select.machine.device import Device
from attn_select.machine.environment import Environment
from attn_select.machine.environment import Library as Library  # plugins find all that a spec is made of here
from attn_select.machine.library_imports import warnings_logged

T_co = TypeVar("T_co", covariant=True)
UNVERIFIED = "unverified"
"""The source of a fact that nothing proves."""


@dataclass(frozen=True, slots=True, eq=False)
class Fact(Generic[T_co]):
    """A value and where it was looked up.

    ``source`` names repository, file and release (``Dao-AILab/flash-attention hopper/flash_api.cpp v2.8.3``),
    a measurement (``ran on H100, flashinfer 0.6.14``), or is the word ``unverified``: a config that uses such a fact
    gets a plan that is marked ``unverified``.
    """

    value: T_co
    source: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a backend cannot run a layer.

    ``code`` is stable kebab-case; ``observed`` and ``supported`` are plain data (str, number, list, None);
    ``remedy`` is a command-line flag, option or install command that would remove this reason, where one exists.
    """

    code: str
    message: str
    observed: Any = None
    supported: Any = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadSizes:
    """Accepted head sizes: those listed, or every multiple of ``multiple_of`` in ``minimum..maximum``."""

    values: tuple[int, ...] = ()
    multiple_of: int = 1
    minimum: int = 1
    maximum: int = 2**31 - 1

    def accepts(self, size: int) -> bool:
        """Whether ``size`` (elements) is accepted."""
        if self.values:
            return size in self.values
        return self.minimum <= size <= self.maximum and size % self.multiple_of == 0

    def __str__(self) -> str:
        if self.values:
            return ", ".join(map(str, self.values))
        step = f"multiples of {self.multiple_of} " if self.multiple_of > 1 else ""
        return (
            f"{step}from {self.minimum} to {self.maximum}" if self.maximum < 2**31 - 1 else f"{step}from {self.minimum}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class ComputeCapabilities:
    """Accepted compute capabilities: closed ranges of ``(major, minor)``, and whether a CPU will do.

    ``ranges=(((8, 0), (9, 9)),)`` accepts 8.0 up to any 9.x.
    """

    ranges: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
    cpu: bool = False

    def accepts(self, capability: tuple[int, int] | None) -> bool:
        """Whether ``capability`` (None for a CPU) is accepted."""
        if capability is None:
            return self.cpu
        return any(low <= capability <= high for low, high in self.ranges)

    def __str__(self) -> str:
        parts = []
        for low, high in self.ranges:
            if high[0] >= 99:
                parts.append(f"{low[0]}.{low[1]} and up")
            elif low[0] == high[0] and low[1] == 0 and high[1] == 9:
                parts.append(f"{low[0]}.x")
            elif low == high:
                parts.append(f"{low[0]}.{low[1]}")
            else:
                parts.append(f"{low[0]}.{low[1]} to {high[0]}.{'x' if high[1] == 9 else high[1]}")
        if self.cpu:
            parts.append("CPU")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Capabilities:
    """What a backend accepts, one sourced fact per question. A question left out means no (or any size).

    ``block_sizes`` lists kernel block sizes in tokens: an allocator's block size is accepted when it is a
    multiple of one of them (the runtime splits blocks). The first is not special: plans choose the default.
    With MLA, ``head_sizes`` speaks of the latent width ``kv_lora_rank + qk_rope_head_dim``.
    """

    compute_capabilities: Fact[ComputeCapabilities]
    dtypes: Fact[tuple[str, ...]]
    kv_cache_dtypes: Fact[tuple[str, ...]]
    """Stored dtypes beside ``auto``; ``auto`` is accepted when the compute dtype is listed here."""
    head_sizes: Fact[HeadSizes]
    block_sizes: Fact[tuple[int, ...]]
    attn_types: Fact[tuple[str, ...]] = Fact(("decoder",), "default")
    mla: bool = False
    """Serves MLA layers, and only those."""
    sparse: bool = False
    """Serves sparse MLA layers, and only those."""
    reads_cache: bool = True
    """False for dense MLA prefill: it runs on decompressed K and V, so cache dtype and block size do not bind it."""
    quantized_kv_cache_on: Fact[ComputeCapabilities] = Fact(
        ComputeCapabilities((((0, 0), (99, 9)),), cpu=True), "default: all accepted devices"
    )
    """Devices that read the quantised ones among ``kv_cache_dtypes``: on others ``plan`` refuses, and no reason offers
    them."""
    mixed_kv_cache_dtype: Fact[bool] = Fact(False, "default")
    """Whether an unquantised cache may differ from the compute dtype (float16 cache, bfloat16 query)."""
    v_head_size_differs: Fact[bool] = Fact(False, "default")
    sliding_window: Fact[bool] = Fact(False, "default")
    attention_chunk_size: Fact[bool] = Fact(True, "default: the runtime makes every chunk a request of its own")
    """Whether layers of ``attention_chunk_size`` are served: by kernels that mask chunks (``BackendPlan.masks_chunks``)
    or, since a chunk is a plain request to them, by any that read block tables."""
    logits_soft_cap: Fact[bool] = Fact(False, "default")
    alibi: Fact[bool] = Fact(False, "default")
    sinks: Fact[bool] = Fact(False, "default")
    position_bias: Fact[bool] = Fact(False, "default")
    dual_chunk: Fact[bool] = Fact(False, "default")
    mm_prefix: Fact[bool] = Fact(False, "default")
    non_causal: Fact[bool] = Fact(False, "default")
    batch_invariant: Fact[bool] = Fact(False, "default")
    per_head_quant_scales: Fact[bool] = Fact(False, "default")
    output_quantizations: Fact[tuple[str, ...]] = Fact((), "default")
    """Beside ``none``: ``fp8``, ``fp4``."""
    decode_context_parallel: Fact[bool] = Fact(False, "default")
    """Whether layers whose cache lies on several ranks are served: every plan returns the LSE, and a batch that is not
    causal (``CommonAttentionMetadata.causal``) attends to all keys of its tables, fewer than its queries among them."""
    nan_tail_safe: Fact[bool] = Fact(True, "default: every backend's duty, which the conformance suite tests")
    """Whether a request's result is right whatever the unused tail of its last block holds, NaN included. Blocks are
    handed from request to request: a backend that is not safe shows one request's NaN to the next. False where any path
    is not safe; the path's plan says so too."""
    speculative_tokens: Fact[int] = Fact(MOST_SPECULATIVE_TOKENS, "default: any uniform query length")
    """The most draft tokens per request (decode query length is this plus one)."""
    draft_tree: Fact[bool] = Fact(False, "default")
    """Whether queries of up to that length are masked by the batch's ``tree_mask``."""

    @property
    def sort(self) -> str:
        """The sort of layers that these speak of, as ``AttentionConfig.sort``; ``sparse``, of which there are none."""
        if self.sparse:
            return "sparse_mla" if self.mla else "sparse"
        return "mla" if self.mla else "attention"


@dataclass(frozen=True, slots=True, eq=False)
class StateCapabilities:
    """What a backend accepts of layers that keep a state, one sourced fact per question.

    The numbers of heads and the width of the convolution are free: the convolution is the runtime's.
    """

    compute_capabilities: Fact[ComputeCapabilities]
    recurrences: Fact[tuple[str, ...]]
    dtypes: Fact[tuple[str, ...]]
    state_dtypes: Fact[tuple[str, ...]]
    head_sizes: Fact[HeadSizes]
    """Widths of query and key heads."""
    v_head_sizes: Fact[HeadSizes]
    speculative_tokens: Fact[int] = Fact(0, "default")
    """The most draft tokens per request: the state behind each of them is kept."""
    sort: ClassVar[Sort] = "state"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackendPlan:
    """How a backend would run one phase of a config on a device.

    Attributes:
        kernel: exactly what runs, as data: a frozen, hashable dataclass of the plugin's own. It is all that the runtime
            reads of the plan's identity; ``path``, ``because`` and ``notes`` are words for people and decide nothing.
            Its ``name`` (a string) is the kernel's stable name within the backend: measured times belong to backend and
            name, and a kernel without one has none.
        path: the inner path in words, e.g. ``FA3``, ``native fa2``, ``TRT-LLM (XQA)``.
        because: why this path and not its siblings, one clause.
        query_dtype: dtype in which the kernel wants Q (``bfloat16``, ``fp8_e4m3``, …).
        rounds_to: FP8 dtype to which the kernel itself rounds the query that it is given, and the weights; None: it
            does not. The conformance suite, ``bench`` and ``run`` accept the error of an FP8 query then.
        returns_lse: whether the path can return the log-sum-exp (cascade, chunk merging and DCP need it).
        kv_layouts: names from ``attn_select.layer.layouts`` that the kernel reads, preferred first; empty: none.
        kernel_block_sizes: block sizes in tokens the kernel runs, preferred first; the allocator's is a multiple of
            one.
        cuda_graph: the level its metadata builder supports.
        workspace_bytes: scratch device memory that it reserves.
        host_us_per_shape: host time that the first step of each new shape takes, microseconds. It counts where times
            order prefills, whose shapes are new in every step. Decodes have few shapes, and an engine warms them up.
        block_table_width_multiple: block tables are padded to a multiple of this many columns.
        provider: ``distribution (module)`` that the kernel comes from, where there is a choice.
        notes: further facts a user should know, one clause each.
        nan_tail_safe: False where a NaN behind a sequence's end in its last block can reach the result; then
            ``Capabilities.nan_tail_safe`` is False as well and says why.
        trees_in_two_parts: with ``draft_tree``, that the kernel takes no mask. The runtime then attends to the context
            by steps that are not causal, to the drafts by itself, and merges both; the plan must return the LSE.
        masks_chunks: whether the kernel keeps queries to their chunk of ``attention_chunk_size``. Where not, the
            runtime gives it every chunk as a request of its own (``attn_select.runtime.virtual_batches``), and the gate
            takes block sizes that divide a chunk and CUDA graphs of single-token decodes alone.
        unverified: what no source proves, or what was never executed anywhere, one clause each. It never rejects: the
            candidate is marked, and the packaged rules rank it behind all others. The gate adds its own clauses.
    """

    kernel: Hashable = None
    path: str
    because: str
    query_dtype: str
    returns_lse: bool
    kv_layouts: tuple[str, ...]
    kernel_block_sizes: tuple[int, ...]
    cuda_graph: CudaGraphLevel
    workspace_bytes: int = 0
    block_table_width_multiple: int = 1
    provider: str | None = None
    notes: tuple[str, ...] = ()
    nan_tail_safe: bool = True
    unverified: tuple[str, ...] = ()
    rounds_to: str | None = None
    masks_chunks: bool = False
    trees_in_two_parts: bool = False
    host_us_per_shape: float = 0.0

    @property
    def kernel_name(self) -> str | None:
        """The stable name of ``kernel``; None where it has none."""
        name = getattr(self.kernel, "name", None)
        return name if isinstance(name, str) else None


class BackendOptions(BaseModel):
    """Base of a backend's ``[backends.NAME]`` table in a rules file. Subclass it and add fields with defaults.

    Describe each with ``Field(description=…)``: ``attn-select backends NAME`` shows it.
    """

    # The validator is built at first use: most starts read no options table.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BackendSpec:
    """One backend as its plugin registers it.

    Attributes:
        name: upper-case, unique, vLLM's name where vLLM has one.
        summary: one line for ``attn-select backends``.
        capabilities: per phase served; a phase left out is not served. One object may serve both.
        plan: called as ``plan(config, device, environment, options, phase)``, also when a capability already speaks
            against the config, so that every reason is seen at once; not called when the kind of attention (MLA,
            sparse) or the phase is wrong. It must not raise for any valid config.
        libraries: groups of alternatives: every group needs one library present, the first preferred.
        options: the pydantic model of its TOML table.
        variables: names of the environment variables that ``plan`` reads; ``environment.variables`` has those that are
            set.
        compile_key: groups configs that share one compilation at first call (conformance tests cap their number).
        load: where its runtime stands, ``MODULE:CLASS``: a subclass of
            ``attn_select.runtime.backend.AttentionBackend``.
        rank: where it stands unless a rule says otherwise: ``("after", "FLASHINFER")`` or ``("before", "TORCH_SDPA")``,
            next to a backend for the same kind of layers; None: behind all others.
        distribution: name and version of what brings it, once it is registered; empty before.
    """

    name: str
    summary: str
    capabilities: Mapping[Phase, Capabilities | StateCapabilities]
    plan: Callable[[Any, Device, Environment, Any, Phase], BackendPlan | list[Reason]]
    load: str
    rank: tuple[Literal["before", "after"], str] | None = None
    libraries: Sequence[Sequence[Library]] = ()
    options: type[BackendOptions] = BackendOptions
    variables: tuple[str, ...] = ()
    compile_key: Callable[[Any], object] = lambda config: None
    distribution: str = ""

    @property
    def owner(self) -> str:
        """Its name, with the distribution that brings it."""
        return f"{self.name} ({self.distribution})" if self.distribution else self.name

    def bug(self, what: str) -> str:
        """Return the message that says what its plugin does wrong."""
        return f"bug in the plugin that registers {self.owner}: {what}"

    def of_attention(self, phase: Phase) -> Capabilities:
        """Return the capabilities in a phase of a backend for attention."""
        found = self.capabilities[phase]
        assert isinstance(found, Capabilities)
        return found

    def get_class(self) -> Any:
        """Import the runtime that ``load`` names and make it ready; return its class.

        Raises:
            RuntimeMissingError: ``load`` names no module or class that is there.
            ImportError: the runtime needs a library that is not installed, such as torch.
            KernelMismatchError: the kernel library is not one that the plugin was written for.
            PluginError: what ``load`` names is no backend.
            BackendError: its module, or what makes it ready, raised something else.
        """
        with warnings_logged(self.name):
            try:
                found = self._found()
                found.prepare()
            except (AttnSelectError, ImportError):
                raise
            except Exception as error:
                text = f"load = {self.load!r} raised {type(error).__name__}: {shorten(error, 300)}"
                raise BackendError(f"backend {self.owner}: {text}") from error
        return found

    def _found(self) -> Any:
        module, _, name = self.load.partition(":")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the runtime is there, and a library that it imports is not
            raise RuntimeMissingError(f"backend {self.name}: load = {self.load!r}: no module {error.name}") from None
        if found is None:
            raise RuntimeMissingError(f"backend {self.name}: load = {self.load!r}: module {module} has no {name}")
        if not callable(getattr(found, "prepare", None)):
            accepted = "AttentionBackend or StateBackend of attn_select.runtime"
            raise PluginError(self.bug(f"load names {show(found)} (accepted: a subclass of {accepted})"))
        return found

    def __copy__(self) -> BackendSpec:
        return self

    def __deepcopy__(self, memo: object) -> BackendSpec:
        return self
