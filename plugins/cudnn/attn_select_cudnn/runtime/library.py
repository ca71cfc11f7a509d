"""The installed frontend and cuDNN: imported, compared with what is called, and asked for graphs, each built once."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from attn_select.errors import KernelMismatchError
from attn_select.runtime.installed_builds import InstalledBuild
from attn_select.runtime.metadata import BatchError
from attn_select_cudnn.facts.cudnn_attn import BUILD, LEAST_CUDNN
from attn_select_cudnn.runtime.graphs import Graph, Shape

_CALLED = {
    "tensor": ("dim", "stride", "data_type", "uid"),
    "build": ("heuristics",),
    "execute": ("tensor_dict", "workspace", "handle"),
    "get_workspace_size": (),
}
_MADE_WITH = ("io_data_type", "intermediate_data_type", "compute_data_type", "handle")


@cache
def frontend() -> ModuleType:
    """Return the module ``cudnn``."""
    installed = InstalledBuild(BUILD)
    graph = getattr(installed.module, "pygraph", None)
    if graph is None:
        raise installed.mismatch("cudnn.pygraph does not exist")
    installed.check(graph, "cudnn.pygraph", keywords=_MADE_WITH)
    for name, keywords in _CALLED.items():
        installed.check(getattr(graph, name), f"cudnn.pygraph.{name}", ("self",), keywords)
    return installed.module


class Graphs:
    """The graphs of one device, and the handle that they run by."""

    def __init__(self, device: torch.device) -> None:
        self._cudnn = frontend()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        major = torch.cuda.get_device_capability(self._index)[0]
        version, least = self._cudnn.backend_version(), LEAST_CUDNN.get(major, max(LEAST_CUDNN.values()))
        if version < least:
            raise KernelMismatchError(
                f"cuDNN {_text(version)} is loaded: compute capability {major}.x needs {_text(least)} or newer",
                hint="install a torch that brings a newer cuDNN",
            )
        with torch.cuda.device(self._index):
            self._handle = self._cudnn.create_handle()
        self._built: dict[Shape, Graph] = {}

    def __deepcopy__(self, memo: object) -> Graphs:
        """Return the same graphs: a copied layer runs on this device too."""
        return self

    def graph(self, shape: Shape) -> Graph:
        """Return the graph of a shape, building it if it is new. That takes the host tens of milliseconds and more."""
        found = self._built.get(shape)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise BatchError(
                    f"cuDNN's graph for {shape.requests} requests of {shape.query_len} tokens is not built yet, and "
                    "cannot be while a CUDA graph is captured",
                    hint="run the step once before it is captured",
                )
            found = self._built[shape] = Graph(self._cudnn, self._handle, shape)
        return found

    def on_this_stream(self) -> None:
        """Make graphs run on torch's current stream."""
        self._cudnn.set_stream(self._handle, torch._C._cuda_getCurrentRawStream(self._index))


@cache
def graphs_of(device: torch.device) -> Graphs:
    """Return the graphs of a device, shared by all layers there."""
    return Graphs(device)


def _text(version: int) -> str:
    """Return ``9.10.2`` for 91002."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
