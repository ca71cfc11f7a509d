"""Page lists as FlashInfer wants them: prefix sums and last lengths on the host, page indices on the device.

numpy (which flashinfer-python needs too) takes 1 us per operation on arrays of a batch's size, torch 2 us and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class HostLengths(Tensor):
    """Lengths on the host of which ``max()`` asks for the largest alone.

    FlashInfer looks for it with Python's ``max`` over the tensor (decode.py and prefill.py 0.6.14, ``plan``): 2.3 us
    per request on an H100's host, 80 % of the time of a plan for 256.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain

    def __iter__(self) -> Iterator[Tensor]:
        yield self.amax()


@dataclass(slots=True)
class PageLists:
    """The pages of a step's requests.

    Attributes:
        paged_kv_indptr: int32 ``(B + 1,)`` on the host, prefix sums of the numbers of pages.
        paged_kv_indices: int32 on the device, at least ``paged_kv_indptr[-1]`` long: the pages of each request.
        paged_kv_last_page_len: int32 ``(B,)`` on the host, tokens in the last page: ``page_size`` for a full one, 0 for
            a request without keys.
        seq_lens: int32 ``(B,)`` on the host.
    """

    paged_kv_indptr: Tensor
    paged_kv_indices: Tensor
    paged_kv_last_page_len: Tensor
    seq_lens: Tensor

    @classmethod
    def of(cls, seq_lens: Tensor, page_size: int, indices: Tensor | None, device: torch.device) -> PageLists:
        """Return the lists of requests with these lengths, int32 ``(B,)`` on the host.

        Args:
            indices: where page indices are to be written, at its front; None: a new tensor on ``device``.
        """
        lens = seq_lens.numpy()
        pages = (lens + (page_size - 1)) // page_size
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        pages.cumsum(dtype=np.int32, out=indptr[1:])
        last = lens - np.maximum(pages - 1, 0) * page_size
        total = max(1, int(indptr[-1]))
        made = torch.empty(total, dtype=torch.int32, device=device) if indices is None else indices[:total]
        lengths = seq_lens.as_subclass(HostLengths)
        return cls(torch.from_numpy(indptr), made, torch.from_numpy(last), lengths)
