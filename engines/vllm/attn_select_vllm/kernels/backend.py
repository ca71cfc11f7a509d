"""What every backend of vLLM tells it that runs attn-select's kernels, whatever the layers are."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

from attn_select_vllm.kernels.batch import of_drafts
from attn_select_vllm.kernels.binding import graph_support
from attn_select_vllm.kernels.limits import standard_caches
from attn_select_vllm.names import OWN_PREFIX


class Own:
    """A base in front of vLLM's. A subclass names its kernels, and its block sizes."""

    backend: ClassVar[str]
    """attn-select's name of the kernels, or a pair's (``names.PAIRS``)."""
    block_sizes: ClassVar[list[int | MultipleOf]]
    """Tokens per block of a cache that the kernels read."""
    best_block_size: ClassVar[int] = 64
    """Which of them is the fastest, where vLLM's user names none. Pages of 64 tokens hold whole tiles."""
    of_layers: ClassVar[type[Any]]
    """What runs a layer; the impl is made of it, with the kernels' name."""
    of_steps: ClassVar[type[Any]]
    """The builder."""
    impl: ClassVar[type[Any]]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = []  # any: attn-select's gate has judged

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "backend" in vars(cls):
            cls.impl = type(cls.__name__.removesuffix("Backend") + "Impl", (cls.of_layers,), {"backend": cls.backend})

    @classmethod
    def get_name(cls) -> str:
        return OWN_PREFIX + cls.backend

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        return cls.of_steps

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return cls.block_sizes

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return cls.best_block_size

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return standard_caches()

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


class OwnSteps:
    """What all builders have in common; a base in front of vLLM's."""

    vllm_config: VllmConfig
    _capturing = False
    """Whether what is built is captured."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return what the layers' plans can capture; of MLA those of decodes, since prefills are never captured."""
        return graph_support(vllm_config)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return what a graph is captured with, by ``build``: vLLM's cross-attention gives it the encoder's lengths."""
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        finally:
            self._capturing = False

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        """Return the metadata of a step that drafts."""
        return self.build(0, of_drafts(common_attn_metadata, self.vllm_config), fast_build=True)  # type: ignore[attr-defined]
