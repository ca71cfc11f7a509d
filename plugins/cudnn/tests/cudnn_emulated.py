"""cuDNN's frontend without a GPU: graphs with the signatures and rules of the real one, computed by the float64 oracle.

``SIGNATURES`` is what the release that is named has; ``test_cudnn_signatures.py`` compares it with what is installed.
The rules are those of include/cudnn_frontend/node/sdpa_support_surface.h and paged_cache_load.h 1.32.0. cuDNN is given
addresses alone, so a tensor is read and written here by the dimensions and strides that its graph declares, whatever
shape the tensor has; an address outside of its memory raises.
"""

from __future__ import annotations

import inspect
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attn_select.reference.oracle import attention_reference

RELEASE = "1.32.0"
SIGNATURES = {
    "__init__": "self, name='test_graph', io_data_type=None, intermediate_data_type=None, compute_data_type=None, "
    "handle=None, sm_count=None, sm_version=None, kernel_cache=None, device_property=None, "
    "is_dynamic_shape_enabled=False, is_override_shape_enabled=False, cuda_graph_retention=None, *, "
    "is_cuda_graph_replay_expected=False, **kwargs",
    "tensor": "self, dim, stride=None, data_type=None, is_virtual=False, is_pass_by_value=False, ragged_offset=None, "
    "reordering_type=None, name='', uid=None, ragged_offset_multiplier=1, alignment_value=1, **kwargs",
    "sdpa": "self, *args, name='', compute_data_type=None, out_dims=None, **kwargs",
    "build": "self, heuristics=None, ctx=None",
    "get_workspace_size": "self, handle=None, override_uids=None, override_shapes=None, override_strides=None",
    "execute": "self, tensor_dict, workspace=None, handle=None, override_uids=None, override_shapes=None, "
    "override_strides=None, tensor_uids=None",
}
"""Parameters of ``cudnn.pygraph`` without annotations."""

SDPA = {
    *("q", "k", "v", "attn_scale", "use_padding_mask", "seq_len_q", "seq_len_kv", "generate_stats"),
    *("paged_attention_k_table", "paged_attention_v_table", "paged_attention_max_seq_len_kv"),
    *("diagonal_alignment", "diagonal_band_right_bound", "diagonal_band_left_bound"),
}
"""Arguments of ``sdpa`` that are known here; the real one takes any and compares them when it lowers the graph."""

data_type = Enum("data_type", "HALF BFLOAT16 FLOAT INT32 INT64")
heur_mode = Enum("heur_mode", "A B FALLBACK")
diagonal_alignment = Enum("diagonal_alignment", "TOP_LEFT BOTTOM_RIGHT")
DTYPES = {
    data_type.HALF: torch.float16,
    data_type.BFLOAT16: torch.bfloat16,
    data_type.FLOAT: torch.float32,
    data_type.INT32: torch.int32,
    data_type.INT64: torch.int64,
}


def signature(name: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {SIGNATURES[name]}: None"))


def need(condition: Any, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


class Declared:
    """A tensor of a graph."""

    def __init__(self, uid: int, dim: Any = None, stride: Any = None, dtype: Any = None) -> None:
        self.uid, self.dim, self.stride, self.dtype = uid, dim, stride, dtype
        self.ragged: Declared | None = None
        self.is_output = False

    def set_output(self, value: bool) -> Declared:
        self.is_output = value
        return self

    def set_uid(self, uid: int) -> Declared:
        self.uid = uid
        return self

    def set_dim(self, dim: Any) -> Declared:
        self.dim = tuple(dim)
        return self

    def set_stride(self, stride: Any) -> Declared:
        self.stride = tuple(stride)
        return self

    def set_data_type(self, dtype: Any) -> Declared:
        self.dtype = dtype
        return self

    def set_ragged_offset(self, offsets: Declared) -> Declared:
        self.ragged = offsets
        return self

    def memory(self, tensor: Tensor, offset: int = 0, dim: Any = None) -> Tensor:
        """Return what the kernel sees at a tensor's address."""
        need(tensor.dtype == DTYPES[self.dtype], f"tensor {self.uid}: {tensor.dtype} is not {self.dtype}")
        return tensor.as_strided(dim or self.dim, self.stride, tensor.storage_offset() + offset)


class PyGraph:
    """``cudnn.pygraph``."""

    built = 0
    """Graphs that were built since the module was installed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.given = signature("__init__").bind(self, *args, **kwargs).arguments
        self.tensors: dict[int, Declared] = {}
        self.node: dict[str, Any] = {}

    def tensor(self, *args: Any, **kwargs: Any) -> Declared:
        given = signature("tensor").bind(self, *args, **kwargs).arguments
        made = Declared(given["uid"], given["dim"], given["stride"], given["data_type"])
        need(made.uid not in self.tensors, f"uid {made.uid} twice")
        self.tensors[made.uid] = made
        return made

    def sdpa(self, **kwargs: Any) -> tuple[Declared, Declared | None]:
        unknown = set(kwargs) - SDPA
        need(not unknown, f"sdpa takes no {unknown}")
        self.node = kwargs
        self.output, self.stats = Declared(-1), Declared(-2) if kwargs["generate_stats"] else None
        return self.output, self.stats

    def build(self, heuristics: Any = None, ctx: Any = None) -> None:
        node, query, keys = self.node, self.node["q"], self.node["k"]
        requests, heads, tokens, size = query.dim
        need(heads % keys.dim[1] == 0, "query heads per KV head")
        need(size % 8 == 0 and size <= 256 and keys.dim[3] == size, f"head size {size}")
        for one in (query, keys, node["v"], self.output):
            need(one.stride[3] == 1, "the head dimension lies apart")
            need(all(stride % 8 == 0 for stride in one.stride[:3]), "an address is not a multiple of 16 bytes")
        need(node["use_padding_mask"] and self.output.is_output, "paged caches need a padding mask")
        need(self.output.dim == query.dim, "output")
        for name in ("paged_attention_k_table", "paged_attention_v_table"):
            columns = -(-node["paged_attention_max_seq_len_kv"] // keys.dim[2])
            need(node[name].dim == (requests, 1, columns, 1), "block table size must equal ceil(s_kv/block_size)")
        for name in ("seq_len_q", "seq_len_kv"):
            need(node[name].dim == (requests, 1, 1, 1), name)
        if node.get("diagonal_band_left_bound") is not None:
            need(node["diagonal_band_left_bound"] > 0, "sliding window length should be greater than zero")
        need((query.ragged is None) == (self.output.ragged is None), "query and output")
        if query.ragged is not None:
            need(query.ragged.dim == (requests + 1, 1, 1, 1), "offsets")
            need(self.stats is None or self.stats.ragged is not None, "offsets of the log-sum-exp")
        if self.stats is not None:
            need(self.stats.dim == (requests, heads, tokens, 1), "log-sum-exp")
        PyGraph.built += 1

    def get_workspace_size(self) -> int:
        return 64

    def execute(self, tensor_dict: dict[int, Tensor], workspace: Tensor, handle: Any = None) -> None:
        need(workspace.numel() >= 64 and workspace.dtype == torch.uint8, "workspace")
        need(handle == self.given["handle"], "handle")
        node, query = self.node, self.node["q"]

        def numbers(declared: Declared) -> list[int]:
            return declared.memory(tensor_dict[declared.uid]).flatten().tolist()

        query_lens, key_lens = numbers(node["seq_len_q"]), numbers(node["seq_len_kv"])
        keys, values = (node[name].memory(tensor_dict[node[name].uid]) for name in "kv")
        tables = [node[f"paged_attention_{name}_table"] for name in "kv"]
        tables = [table.memory(tensor_dict[table.uid])[:, 0, :, 0] for table in tables]
        _, heads, longest, size = query.dim
        for request, (rows, count) in enumerate(zip(query_lens, key_lens, strict=True)):
            need(rows <= longest and count <= node["paged_attention_max_seq_len_kv"], "a length above the graph's")

            def part(declared: Declared, width: int, request: int = request, rows: int = rows) -> Tensor:
                """Return ``(heads, rows, width)`` of one request."""
                at = request * declared.stride[0]
                if declared.ragged is not None:
                    at = numbers(declared.ragged)[request]
                return declared.memory(tensor_dict[declared.uid], at, (1, heads, rows, width))[0]

            if not rows:
                continue
            pages = -(-count // keys.shape[2])
            cached = [
                cache[table[request, :pages].long()].transpose(1, 2).flatten(0, 1)[:count]
                for cache, table in zip((keys, values), tables, strict=True)
            ]
            window = node.get("diagonal_band_left_bound")
            causal = node.get("diagonal_band_right_bound") == 0
            need(not causal or node["diagonal_alignment"] == diagonal_alignment.BOTTOM_RIGHT, "alignment")
            found, lse = attention_reference(
                part(query, size).transpose(0, 1),
                *cached,
                scale=node["attn_scale"],
                causal=causal,
                sliding_window=window,
            )
            if not count:
                found, lse = found.fill_(torch.nan), lse.fill_(torch.nan)  # what is written there is not promised
            part(self.output, size).copy_(found.transpose(0, 1))
            if self.stats is not None:
                part(self.stats, 1).copy_(lse.T.unsqueeze(-1))


def module(version: int = 91900) -> ModuleType:
    """Return the module ``cudnn`` with a cuDNN of that version."""
    made: Any = ModuleType("cudnn")
    pygraph = type("pygraph", (PyGraph,), {"built": 0})
    for name in SIGNATURES:
        plain = getattr(PyGraph, name)

        def call(self: Any, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            return _plain(self, *args, **kwargs)

        call.__signature__ = signature(name)  # type: ignore[attr-defined]
        setattr(pygraph, name, call)
    made.pygraph, made.data_type, made.heur_mode = pygraph, data_type, heur_mode
    made.diagonal_alignment, made.backend_version = diagonal_alignment, lambda: version
    made.create_handle = lambda: "handle"
    made.streams = []
    made.set_stream = lambda handle, stream: made.streams.append((handle, stream))
    return made
