"""The emulated frontend has the signatures of the installed one, and another one is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from attn_select.errors import KernelMismatchError
from attn_select.machine.environment import Environment
from attn_select_cudnn.facts.cudnn_attn import FRONTEND

pytest.importorskip("torch")

import cudnn_emulated as emulated
import torch

from attn_select_cudnn.runtime.graphs import Graph, Shape
from attn_select_cudnn.runtime.library import frontend, graphs_of

PLAIN = Shape(
    requests=4,
    query_len=1,
    packed=False,
    keys=256,
    columns=16,
    table_stride=16,
    heads=8,
    cache=(99, 2, 16, 128),
    key_strides=(8192, 128, 256, 1),
    value_strides=(8192, 128, 256, 1),
    dtype=torch.bfloat16,
    scale=0.1,
    window=None,
    lse=False,
)


def installed() -> Any:
    """Import the real frontend, or skip. It needs no GPU to be imported."""
    if Environment().version(FRONTEND.distribution) is None:
        pytest.skip(f"{FRONTEND.distribution} is not installed")
    return pytest.importorskip("cudnn")


@pytest.mark.parametrize("name", emulated.SIGNATURES)
def test_the_installed_frontend_takes_what_the_emulated_one_takes(name: str) -> None:
    real = inspect.signature(getattr(installed().pygraph, name)).parameters
    recorded = emulated.signature(name).parameters
    assert list(real)[: len(recorded)] == list(recorded)
    for parameter in recorded.values():
        assert (real[parameter.name].kind, real[parameter.name].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_the_installed_frontend_takes_the_graphs(
    packed: bool, lse: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares a graph's tensors and arguments with the operation without a GPU; only plans need one."""
    cudnn, checked = installed(), []
    monkeypatch.setattr(cudnn.pygraph, "build", lambda self, heuristics: checked.append(self.validate()))
    monkeypatch.setattr(cudnn.pygraph, "get_workspace_size", lambda self: 0)
    query_len = 64 if packed else 1
    Graph(cudnn, None, replace(PLAIN, query_len=query_len, packed=packed, lse=lse, window=window))
    assert len(checked) == 1


def test_another_signature_is_named(emulate: Callable[..., Any]) -> None:
    def tensor(self: Any, sizes: Any) -> None: ...

    emulate().pygraph.tensor = tensor
    with pytest.raises(KernelMismatchError, match=r"pygraph\.tensor has another signature.*It takes \(self, sizes\)"):
        frontend()


def test_a_frontend_without_graphs_is_named(emulate: Callable[..., Any]) -> None:
    del emulate().pygraph
    with pytest.raises(KernelMismatchError, match=r"cudnn\.pygraph does not exist"):
        frontend()


@pytest.mark.parametrize(
    ("version", "capability", "least"),
    [(91001, (9, 0), "9.10.2"), (91800, (8, 0), "9.18.1"), (90900, (12, 0), "9.10.2")],
)
def test_an_old_cudnn_is_named(emulate: Callable[..., Any], version: int, capability: Any, least: str) -> None:
    emulate(version, capability)
    with pytest.raises(KernelMismatchError, match=f"{capability[0]}.x needs {least} or newer"):
        graphs_of(torch.device("cpu"))
