"""``Served``: one loaded backend of a group, with what names it where its code fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attn_select.backends.spec import BackendSpec
from attn_select.errors import PluginError
from attn_select.runtime.backend import AttentionBackend, AttentionMetadataBuilder, BackendContext
from attn_select.runtime.backend_faults import blame, returned_nothing
from attn_select.runtime.metadata import CommonAttentionMetadata, VarlenMetadata
from attn_select.runtime.terms import Terms
from attn_select.runtime.virtual_batches import VirtualBatches


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

    def impl(self, terms: Terms) -> Any:
        """Return the impl of one layer.

        Raises:
            BackendError, PluginError: it raised something, or lacks the path of a phase.
        """
        try:
            return self.backend.impl_cls(self.context, terms)
        except PluginError as error:
            raise PluginError(self.spec.bug(error.message)) from None
        except Exception as error:
            blame(self.spec, "its impl", error)
            raise
