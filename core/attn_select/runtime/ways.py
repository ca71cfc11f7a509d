"""Which backend computes which phase of a step: as the selection says, or the one that is predicted to be fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_select.backends.spec import BackendSpec
from attn_select.errors import ConfigError, PluginError
from attn_select.layer.config import CUDA_GRAPH_LEVELS, AttentionConfig, CudaGraphLevel, Phase
from attn_select.runtime.backend import AttentionBackend, AttentionMetadataBuilder, BackendContext
from attn_select.runtime.backend_faults import blame, returned_nothing
from attn_select.runtime.dispatch import Dispatch
from attn_select.runtime.metadata import CommonAttentionMetadata, VarlenMetadata
from attn_select.runtime.virtual_batches import VirtualBatches
from attn_select.times.step_choice import Names, by_phase, lead_of
from attn_select.times.workload import Workload


@dataclass(slots=True)
class Served:
    """One backend as a group uses it: what was chosen, loaded, and the builder that all layers share.

    ``chunks`` cuts its batches where the layers attend inside chunks and the kernel does not mask them; else None.
    """

    spec: BackendSpec
    backend: type[AttentionBackend]
    context: BackendContext
    builder: AttentionMetadataBuilder[Any]
    chunks: VirtualBatches | None = None

    def build(self, prefix: int, common: CommonAttentionMetadata, fast: bool) -> Any:
        """Return what the builder builds for a step.

        Raises:
            BackendError, PluginError: it raised something, or returned None.
        """
        return self._built("build()", self.builder.build, prefix, common, fast)

    def build_for_capture(self, common: CommonAttentionMetadata) -> Any:
        """Return what the builder builds for a graph. Raises as ``build`` does."""
        return self._built("build_for_cudagraph_capture()", self.builder.build_for_cudagraph_capture, common)

    def build_prefill(self, varlen: VarlenMetadata) -> Any:
        """Return what the builder builds for a call of ``forward_mha``. Raises as ``build`` does."""
        return self._built("build_prefill()", self.builder.build_prefill, varlen)

    def _built(self, call: str, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            built = method(*arguments)
        except Exception as error:
            blame(self.spec, call, error)
            raise
        return built if built is not None else returned_nothing(self.spec, call, "the metadata that forward takes")

    def impl(self, **options: Any) -> Any:
        """Return the impl of one layer, made with ``options``.

        Raises:
            BackendError, PluginError: it raised something, or lacks the path of a phase.
        """
        try:
            return self.backend.impl_cls(self.context, **options)
        except PluginError as error:
            raise PluginError(self.spec.bug(error.message)) from None
        except Exception as error:
            blame(self.spec, "its impl", error)
            raise


@dataclass(slots=True)
class Way:
    """Which backend computes which phase of a step.

    Attributes:
        served: the backends per phase; the same object in both where one serves both.
        unified: whether one backend serves every phase that the layers have: then batches are not split.
    """

    served: dict[Phase, Served]
    unified: bool


class Ways:
    """The ways of a group's steps.

    Args:
        config: the layers.
        backends: every backend of the group by name.
        names: the selection's backend per phase that the group serves.
        dispatch: the choice between backends that take turns; None: the selection's backends run every step.
        workload: of the selection; says how long the requests of captured decodes are.

    Attributes:
        usual: the way that the selection says.
    """

    def __init__(
        self,
        config: AttentionConfig,
        backends: Mapping[str, Served],
        names: Mapping[Phase, str],
        dispatch: Dispatch | None,
        workload: Workload | None,
    ) -> None:
        self._config, self._backends, self._dispatch, self._workload = config, backends, dispatch, workload
        self.usual = self._way_of(names)
        self._known: dict[Names, Way] = {}
        self._captured: dict[tuple[int, int, int], Way] = {}

    def check_threshold(self, least: int | None) -> None:
        """Make sure that all backends count the same requests as decodes.

        Args:
            least: the group's ``reorder_batch_threshold``.

        Raises:
            ConfigError: a backend that takes turns counts fewer requests as decodes than the choice does.
        """
        if self._dispatch is None or least is None or least >= self._dispatch.choice.longest_decode:
            return
        name = next(name for name, s in self._backends.items() if s.builder.reorder_batch_threshold == least)
        raise ConfigError(
            f"dispatch = 'measured': {name} takes queries of up to {least} tokens for decodes, but with "
            f"num_speculative_tokens = {self._config.num_speculative_tokens} decodes have "
            f"{self._dispatch.choice.longest_decode}",
            fields=["dispatch", "num_speculative_tokens"],
            hint="leave dispatch out, or select with fewer speculative tokens",
        )

    def of_step(self, common: CommonAttentionMetadata) -> Way:
        """Return the way of a step."""
        if self._dispatch is None:
            return self.usual
        size = common.num_reqs, common.num_actual_tokens, common.max_query_len
        if self._captured and size in self._captured:
            return self._captured[size]
        num_keys = int(common.seq_lens_cpu.sum()) if common.num_keys is None else common.num_keys
        whole, choice = (*size, num_keys, common.max_seq_len), self._dispatch.choice
        if common.max_query_len <= choice.longest_decode:
            return self._chosen(choice(None, whole))
        lead = common.lead or lead_of(common.query_lens_cpu.tolist(), common.seq_lens_cpu.tolist())
        return self._chosen(choice(*by_phase(whole, lead, choice.longest_decode)))

    def to_capture(self, common: CommonAttentionMetadata, level: CudaGraphLevel) -> Way:
        """Return the way of a captured size. Its first capture settles it, and all replays go that way.

        Decodes are predicted with the workload's lengths, mixed batches run as the selection says.

        Args:
            common: the batch.
            level: of the group's graphs; a backend that is captured has it or a higher one.
        """
        if self._dispatch is None:
            return self.usual
        size = common.num_reqs, common.num_actual_tokens, common.max_query_len
        if size not in self._captured:
            way, choice = self.usual, self._dispatch.choice
            if common.max_query_len <= choice.longest_decode:
                assert self._workload is not None  # without one there are no times to choose by
                shapes = self._workload.of_phase("decode", self._config)
                able = [name for name, served in self._backends.items() if _reaches(served, level)]
                way = self._chosen(choice.captured(common.num_reqs, common.max_query_len, shapes, able))
            self._captured[size] = way
        return self._captured[size]

    def _chosen(self, names: Names) -> Way:
        """Return the way of a step that is given to these backends."""
        if (way := self._known.get(names)) is None:
            phases: tuple[tuple[Phase, str | None], ...] = ("prefill", names[0]), ("decode", names[1])
            way = self._known[names] = self._way_of({phase: name for phase, name in phases if name is not None})
        return way

    def _way_of(self, names: Mapping[Phase, str]) -> Way:
        served = {phase: self._backends[name] for phase, name in names.items()}
        return Way(served, len(set(names.values())) == 1 and len(names) == len(self._config.phases))


def _reaches(served: Served, level: CudaGraphLevel) -> bool:
    """Whether a backend captures all batches of this level."""
    return CUDA_GRAPH_LEVELS.index(served.builder.cudagraph_support) >= CUDA_GRAPH_LEVELS.index(level)
