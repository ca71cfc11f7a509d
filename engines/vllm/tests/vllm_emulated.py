"""What the adapter touches of vLLM, in as few lines as it takes, with vLLM's signatures.

``test_vllm_contract.py`` compares the signatures with the installed package's, where there is one.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, EnumMeta, StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

M = TypeVar("M")


class AttentionType(StrEnum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def validate_configuration(cls, *asked: Any, **also: Any) -> list[str]:
        return []


class AttentionImpl(Generic[M]):
    pass


class AttentionMetadataBuilder(Generic[M]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None


class AttentionSelectorConfig(NamedTuple):
    head_size: int
    dtype: Any
    kv_cache_dtype: str | None
    block_size: int | None
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    attn_type: str = "decoder"
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False


class QueryLenSupport(Enum):
    SINGLE_ONLY = "single_only"
    VARLEN = "varlen"


@dataclass
class MLACommonMetadata(Generic[M]):
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int


class MLACommonBackend(AttentionBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


RANKS = SimpleNamespace(size=1, rank=0, interleave=1)
"""The ranks that share contexts: how many, which one is meant, and how many neighbouring positions one keeps."""
COLLECTIVES = threading.local()
"""``group``: the process group of the rank that a thread stands for."""


def get_dcp_group() -> Any:
    return SimpleNamespace(rank_in_group=RANKS.rank, device_group=getattr(COLLECTIVES, "group", None))


def get_dcp_local_seq_lens(
    seq_lens: Any, dcp_size: int = 1, dcp_rank: Any = None, cp_kv_cache_interleave_size: int = 1
) -> Any:
    """As vLLM's: whole turns of all ranks, and what the rank has of the last one."""
    step = cp_kv_cache_interleave_size
    turns = seq_lens // (step * dcp_size)
    rest = seq_lens - turns * step * dcp_size - dcp_rank * step
    return (turns * step + rest.clamp(0, step)).int()


class MLACommonMetadataBuilder(AttentionMetadataBuilder[M]):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any, metadata_cls: Any = None
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.metadata_cls, self.dcp_world_size = metadata_cls, RANKS.size
        drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", 0)
        as_decodes = self.query_len_support is not QueryLenSupport.SINGLE_ONLY and RANKS.size == 1  # type: ignore[attr-defined]
        self.reorder_batch_threshold = 1 + drafts if as_decodes else 1
        self.dcp_local_block_size, self.dcp_virtual_block_size = RANKS.interleave, RANKS.interleave * RANKS.size

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        lens = common_attn_metadata.query_start_loc_cpu.diff()
        decodes = int((lens <= self.reorder_batch_threshold).sum())
        return self.metadata_cls(decodes, int(lens[:decodes].sum()), len(lens) - decodes)


class MLACommonImpl(Generic[M]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: Any,
        kv_cache_dtype: str,
        logits_soft_cap: Any,
        attn_type: str,
        kv_sharing_target_layer_name: Any,
        q_lora_rank: Any,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
    ) -> None:
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.dcp_world_size = RANKS.size
        self.need_to_return_lse_for_decode = RANKS.size > 1 and type(self).can_return_lse_for_decode  # type: ignore[attr-defined]


def get_mla_prefill_backend(vllm_config: Any) -> Any:
    """Return FlashAttention's, which vLLM chooses on most GPUs."""
    return type("FLASH_ATTN", (), {"__module__": "vllm"})


def concat_mla_q(ql_nope: Any, q_pe: Any, q_out: Any) -> None:
    """As vLLM's kernel, which takes no other sizes (csrc/concat_mla_q.cuh)."""
    assert (ql_nope.shape[-1], q_pe.shape[-1]) == (512, 64)
    q_out[..., :512], q_out[..., 512:] = ql_nope, q_pe


class _BackendEnumMeta(EnumMeta):
    def __getitem__(cls, name: str) -> Any:
        try:
            return super().__getitem__(name)
        except KeyError:
            raise ValueError(f"Unknown attention backend: '{name}'") from None


def registry(names: tuple[str, ...], registers: bool) -> Any:
    """Return an ``AttentionBackendEnum``: one that can make members, or one of the releases until 0.26."""
    enum: Any = _BackendEnumMeta("AttentionBackendEnum", (_Member,), _members(names))
    if registers:
        enum.register = classmethod(_register)
    return enum


def _members(names: tuple[str, ...]) -> Any:
    body = _BackendEnumMeta.__prepare__("AttentionBackendEnum", (_Member,))
    body["__module__"] = __name__
    for name in names:
        body[name] = f"vllm.{name}"
    return body


class _Member(Enum, metaclass=_BackendEnumMeta):
    def get_path(self) -> str:
        return str(self.value)

    def get_class(self) -> type[AttentionBackend]:
        own = self.get_path().startswith("attn_select_vllm.")
        found: type[AttentionBackend] = pkgutil.resolve_name(self.get_path()) if own else AttentionBackend
        return found


def _register(cls: Any, name: str, value: str) -> Any:
    """As vLLM's, v1/attention/backends/registry.py 0.32."""
    if name in cls._member_map_:
        raise ValueError(f"Backend {name} already exists")
    member = object.__new__(cls)
    member._name_, member._value_ = name, value
    setattr(cls, name, member)
    cls._member_map_[name] = member
    cls._value2member_map_[value] = member
    cls._member_names_.append(name)
    return member


def register_backend_of(enum: Any) -> Any:
    """Return the ``register_backend`` of an ``AttentionBackendEnum``; until 0.26 a name changes nothing."""

    def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> None:
        if isinstance(backend, str) and hasattr(enum, "register"):
            enum.register(backend, class_path or "")

    return register_backend


class Platform:
    """``CpuPlatform``: one backend, whatever is asked for."""

    device_name = "cpu"
    capability: tuple[int, int] | None = None

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> Any:
        return cls.capability

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        return "vllm.CPU_ATTN"


@dataclass
class Log:
    """``init_logger``'s."""

    lines: list[str] = field(default_factory=list)

    def info_once(self, msg: str, *args: Any, scope: str = "local") -> None:
        if (text := msg % args) not in self.lines:
            self.lines.append(text)

    def warning_once(self, msg: str, *args: Any, scope: str = "local") -> None:
        self.info_once("WARNING " + msg, *args)


class Text(SimpleNamespace):
    """A Hugging Face config."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def engine_config(text: dict[str, Any], tensor_parallel: int = 1, **changes: Any) -> Any:
    """Return vLLM's ``VllmConfig`` of a model, without CUDA graphs."""
    heads, kv_heads = text["num_attention_heads"], text.get("num_key_value_heads", text["num_attention_heads"])
    model = SimpleNamespace(
        hf_text_config=Text(**text),
        get_num_attention_heads=lambda parallel: heads // parallel.tensor_parallel_size,
        get_head_size=lambda: text["head_dim"],
        get_num_kv_heads=lambda parallel: max(1, kv_heads // parallel.tensor_parallel_size),
        enforce_eager=True,
        dtype=torch.float32,
        max_model_len=256,
    )
    parts: dict[str, Any] = {
        "model_config": model,
        "parallel_config": SimpleNamespace(tensor_parallel_size=tensor_parallel, decode_context_parallel_size=1),
        "cache_config": SimpleNamespace(sliding_window=None, calculate_kv_scales=False),
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        "speculative_config": None,
        "compilation_config": SimpleNamespace(cudagraph_mode=None, static_forward_context={}),
        "attention_config": SimpleNamespace(mla_prefill_backend=None),
    }
    return SimpleNamespace(**parts | changes)


@contextmanager
def emulated_vllm(config: Any, version: str = "0.32.0") -> Iterator[SimpleNamespace]:
    """Put the emulated modules in vLLM's place; yields ``platform``, ``registry``, ``log`` and ``config``."""

    class OwnPlatform(Platform):
        pass

    registers = int(version.split(".")[1]) > 26
    backends = registry(("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN"), registers)
    log, platform = Log(), OwnPlatform()

    def platform_choice(backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        return OwnPlatform.get_attn_backend_cls(backend, attn_selector_config, num_heads)

    backend = {
        name: globals()[name]
        for name in (
            "AttentionBackend",
            "AttentionCGSupport",
            "AttentionImpl",
            "AttentionMetadataBuilder",
            "AttentionType",
            "MultipleOf",
        )
    }
    mla = {name: value for name, value in globals().items() if name.startswith("MLACommon")}
    prefill = "vllm.v1.attention.backends.mla.prefill"
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version, "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
        "vllm._custom_ops": {"concat_mla_q": concat_mla_q},
        "vllm.logger": {"init_logger": lambda name: log},
        "vllm.config": {"VllmConfig": object, "get_current_vllm_config": lambda: config},
        "vllm.distributed": {"get_dcp_group": get_dcp_group},
        "vllm.v1.attention.backends.utils": {"get_dcp_local_seq_lens": get_dcp_local_seq_lens},
        "vllm.platforms": {"current_platform": platform},
        "vllm.v1.attention.backend": backend,
        "vllm.v1.attention": {"selector": SimpleNamespace(_cached_get_attn_backend=functools.cache(platform_choice))},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": backends,
            "register_backend": register_backend_of(backends),
        },
        "vllm.model_executor.layers.attention.mla_attention": {**mla, "QueryLenSupport": QueryLenSupport},
        f"{prefill}.base": {"MLADimensions": SimpleNamespace},
        f"{prefill}.registry": {"MLAPrefillBackendEnum": registry(("FLASH_ATTN", "FLASHINFER"), False)},
        f"{prefill}.selector": {
            "MLAPrefillSelectorConfig": SimpleNamespace,
            "get_mla_prefill_backend": get_mla_prefill_backend,
        },
    }
    before = dict(sys.modules)
    for name, content in modules.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            sys.modules.setdefault(path, ModuleType(path))
        vars(sys.modules[name]).update(content)
    try:
        yield SimpleNamespace(platform=platform, registry=backends, log=log, config=config)
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("vllm", "attn_select_vllm")]:
            if name not in before:
                del sys.modules[name]
                parent, _, child = name.rpartition(".")
                if parent in sys.modules:  # `from parent import child` would find it there
                    delattr(sys.modules[parent], child)
