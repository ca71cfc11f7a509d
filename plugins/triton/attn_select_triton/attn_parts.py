"""What a step of ``TRITON_ATTN`` consists of: launches that all layers of a kind make alike."""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from attn_select.errors import KernelMismatchError
from attn_select_triton.hardware import GLUON_CAPABILITY, GLUON_TRITON
from attn_select_triton.kernels.decode import Decode
from attn_select_triton.kernels.launch import capability_of
from attn_select_triton.triton_attn import WARPS


@dataclass(slots=True)
class Gather:
    """Keys and values copied out of their pages before a prefill.

    Attributes:
        whole: where to, rows padded to powers of two.
        rows: the same without the padding.
        arguments: of ``gather_pages``.
    """

    whole: tuple[Tensor, Tensor]
    rows: tuple[Tensor, Tensor]
    arguments: dict[str, Any]


@dataclass(slots=True)
class Part:
    """Requests that one launch serves, by the decode kernel or else the prefill's.

    Attributes:
        causal, ranges: as ``Terms`` has them.
        decode: the prepared decode.
        gather: what comes before a prefill.
        prefill: arguments of ``prefill_attention``.
        warps: the prefill's kernel is ``prefill_hopper``, where it can read this cache.
    """

    causal: bool
    ranges: Tensor | None = None
    decode: Decode | None = None
    gather: Gather | None = None
    prefill: dict[str, Any] = field(default_factory=dict)
    warps: bool = False


def check_gluon(device: torch.device) -> None:
    """Check that a plan's Gluon kernel is one for this device and this Triton.

    Raises:
        KernelMismatchError: it is not.
    """
    if capability_of(device) != GLUON_CAPABILITY or not triton.__version__.startswith(GLUON_TRITON):
        raise KernelMismatchError(
            f"the plan says {WARPS}, which runs on compute capability 9.0 with Triton {GLUON_TRITON}x, not on {device} "
            f"({'.'.join(map(str, capability_of(device)))}) with Triton {triton.__version__}",
            hint="select on the machine that runs the layers",
        )


@dataclass(slots=True)
class TritonAttnMetadata:
    """One step for all layers of a kind.

    Attributes:
        num_actual_tokens: T.
        parts: the launches; with a prefix those of each request's rest.
        prefix: the launches for a prefix that all requests share, which is one request of T queries.
    """

    num_actual_tokens: int
    parts: list[Part]
    prefix: list[Part] | None = None
