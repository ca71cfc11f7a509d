"""Barriers in shared memory by which the warps of a Gluon kernel on Hopper hand tiles to each other."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attn_select_triton.kernels.gluon_names import barrier


@gluon.jit
def barriers_of(STAGES: gl.constexpr):
    """Return memory of a barrier for each stage."""
    return gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def hand_back(empty, buffer):
    """Tell the loader that this compute group is through with a tile, or with its part of one."""
    # One arrival stands for the whole group, so all of its warps must be done before.
    barrier()
    mbarrier.arrive(empty.index(buffer), count=1)
