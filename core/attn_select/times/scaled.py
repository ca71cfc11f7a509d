"""Times of one GPU, scaled to another that has the same multiprocessors and another memory.

Of two such GPUs only the part of a time that the memory takes differs. Measured by the published tables of H200 and
H100 (``research/bench_scaled_times.py``; docs/times-model.md has the figures).
"""

from __future__ import annotations

import math

from attn_select.machine.device import Device

SCALED_MARGIN = 0.09
"""Half the width of the 95 % interval of a measured time that was scaled, as a share of it."""
_REACHED = 0.9
"""Share of the peak bandwidth that kernels reach."""


def can_scale(measured: Device, other: Device) -> bool:
    """Whether times on ``measured`` say something about ``other``: GPUs of one compute capability that have as many
    multiprocessors and multiply as fast, both with a known bandwidth."""
    figures = [
        (gpu.compute_capability, gpu.sm_count, gpu.bf16_tflops, gpu.fp8_tflops)
        for gpu in (measured, other)
        if gpu.sm_count and gpu.bf16_tflops and gpu.bandwidth_gbps
    ]
    return measured.name != other.name and len(figures) == 2 and figures[0] == figures[1]


def scaled_us(time_us: float, memory_bytes: float, measured: Device, other: Device) -> float:
    """Return what takes ``time_us`` on ``measured`` as it takes on ``other``, both as ``can_scale`` accepts them.

    The time is taken as the root of two squares, of the memory's part and of all else, since kernels overlap the two.

    Args:
        time_us: measured or predicted, microseconds.
        memory_bytes: that the step moves to and from the GPU's memory.
        measured: the GPU of ``time_us``.
        other: the GPU that is asked about.
    """
    assert measured.bandwidth_gbps
    assert other.bandwidth_gbps
    part = min(time_us, memory_bytes / (_REACHED * measured.bandwidth_gbps * 1e3))
    slower = measured.bandwidth_gbps / other.bandwidth_gbps
    return math.sqrt(time_us**2 + part**2 * (slower**2 - 1))
