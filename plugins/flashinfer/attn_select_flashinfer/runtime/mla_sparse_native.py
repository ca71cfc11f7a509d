"""Sparse MLA on compute capability 9.0: the fa3 kernel of ``FLASHINFER_MLA``, on pages of one token.

The slots of a token are its page indices, and each token is a request of one query. FlashInfer plans the numbers of
keys on the host, which knows only that a token has at most ``sparse_top_k``. So the schedule is our own
(``mla_schedule``), for tokens that have all of them, and each layer says on the device where its pieces end. A piece
that ends where it begins has no tile of keys and takes part in nothing (``has_kv`` in attention/mla_hopper.cuh, the
same in 0.6.14 and 0.7.2.post1). vLLM 0.33 does likewise in FlashInfer's own lists
(v1/attention/backends/mla/flashinfer_mla_sparse_sm90.py).

A schedule depends on the number of tokens alone. FlashInfer plans once, for one token. That compiles the kernel, and
says how large the grid is and where partial results lie, which is the same for all batches of such requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from attn_select.runtime.backend import BackendContext
from attn_select.runtime.batch import to_device
from attn_select_flashinfer.runtime import library
from attn_select_flashinfer.runtime.mla_native import given_lists, plan_arguments
from attn_select_flashinfer.runtime.mla_schedule import (
    KV_END,
    KV_LEN,
    KV_START,
    Q_INDPTR,
    MLALists,
    planned,
    write_lists,
)


@dataclass(slots=True, eq=False)
class SparseCall:
    """The schedule of one number of tokens, for any layer."""

    num_tokens: int  # T
    backend: Any  # what ``run`` reads the plan from
    wrapper: Any  # FlashInfer's
    memory: Tensor  # uint8 on the device, the lists
    info: Any  # the numbers of ``MLAPlanInfo``, which say where the lists are
    tokens: Tensor  # ``(P,)``, the token of each piece
    starts: Tensor  # starts, ends: int32 ``(P,)``, its keys where a token has all of its slots
    ends: Tensor
    kv_len: Tensor  # kv_len, kv_end: int32 ``(P,)``, views of the lists: what the kernel reads
    kv_end: Tensor

    def choose(self, slots: Tensor, counts: Tensor) -> None:
        """Let the next run attend to ``slots (T, k)``, the first ``counts (T,)`` of each, both int32."""
        lens = counts[self.tokens]
        self.kv_len.copy_(lens)
        torch.maximum(torch.minimum(lens, self.ends), self.starts, out=self.kv_end)
        self.backend._kv_indices_buf = slots.view(-1)

    def ready_for(self, scale: float) -> Any:
        """Return FlashInfer's wrapper, planned for this call and a scale of the softmax."""
        backend = self.backend
        backend._int_workspace_buffer, backend._plan_info = self.memory, self.info
        backend._sm_scale = scale
        return self.wrapper


class SparseSchedules:
    """Makes schedules, and keeps a CUDA graph's schedule where the graph finds it."""

    def __init__(self, context: BackendContext, width: int) -> None:
        # width: k, slots of a row, at least ``sparse_top_k``
        config = context.config
        self._device, self._heads, self._width = context.device, config.num_heads, width
        self._most = cast(int, config.sparse_top_k)
        size = max(plan.workspace_bytes for plan in context.plans.values())
        workspace = torch.empty(size, dtype=torch.uint8, device=context.device)
        self._wrapper = library.flashinfer().BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
        # A call has its layer's scale.
        self._fixed = {**plan_arguments(config, 1), "causal": False, "sm_scale": 1.0}
        self._backend: Any = None
        self._captured: dict[int, SparseCall] = {}

    def capture(self, tokens: int) -> SparseCall:
        """Return the schedule of so many tokens, which stays where it is from now on."""
        return self._captured.setdefault(tokens, self.of(tokens))

    def of(self, tokens: int) -> SparseCall:
        """Return the schedule of so many tokens, at least one; nothing waits for the device."""
        if tokens in self._captured:
            return self._captured[tokens]
        if self._backend is None:
            self._plan()
        place = MLALists(torch.empty(0, device=self._device), 0, tokens, self._heads)
        info = place.info_of(self._backend)
        host, lists = place.host()
        rows = torch.arange(tokens + 1, dtype=torch.int32)
        keys = torch.full((tokens,), self._most, dtype=torch.int32)
        grid = int(info[0]), int(info[1])
        pieces = write_lists(lists, self._heads, rows, rows * self._width, keys, grid=grid)
        memory = to_device(host, self._device)
        own = memory.view(torch.int32).view(len(lists), -1)[:, :pieces]
        fixed = own[Q_INDPTR].long(), own[KV_START], own[KV_END].clone()
        return SparseCall(tokens, self._backend, self._wrapper, memory, info, *fixed, own[KV_LEN], own[KV_END])

    def _plan(self) -> None:
        """Let FlashInfer plan a token that has all of its slots."""
        one, most = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, self._most], dtype=torch.int32)
        indices = torch.zeros(self._most, dtype=torch.int32, device=self._device)
        self._wrapper.plan(**given_lists(one, most, most[1:], indices), **self._fixed)
        self._backend = planned(self._wrapper)
