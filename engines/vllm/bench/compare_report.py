"""What ``compare.py`` prints: rates with their intervals, and how far outputs are apart."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any


def differences(first: Path, other: Path) -> dict[str, tuple[float, float, float]]:
    """Return by case how far two arms' outputs are apart.

    Norm of the difference by the first's, the same of the request where it is greatest, and the largest difference.
    """
    import torch

    ours, theirs = torch.load(first), torch.load(other)
    found = {}
    for case, outputs in ours.items():
        for what, one in outputs.items():
            if one.numel():
                if one.shape != theirs[case][what].shape:
                    raise SystemExit(f"{what}, {case}: {one.shape} beside {theirs[case][what].shape}")
                gap = one - theirs[case][what]
                rows = gap.flatten(1).norm(dim=1) / one.flatten(1).norm(dim=1)
                found[f"{what}, {case}"] = (float(gap.norm() / one.norm()), float(rows.max()), float(gap.abs().max()))
    return found


def middle(ratios: list[float]) -> tuple[float, float, float]:
    """Return the median and a 95 % interval of it, which assumes no distribution: two of the ordered values.

    As many values as possible are left out at each end, so that the median lies outside in at most 2.5 % of samples.
    With fewer than six no such interval exists, and the range is returned.
    """
    ordered, count = sorted(ratios), len(ratios)
    outside, below = 0, 0.0
    while (below := below + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    low = max(0, outside - 1)
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]


def report_rates(seconds: dict[str, list[float]], batch: int, steps: int, busy: dict[str, float]) -> None:
    """Print the arms' times of a step, tokens per second and, per round, their ratio to the first arm's."""
    base = next(iter(seconds.values()))
    for name, own in seconds.items():
        step = statistics.median(own) / steps
        ratios = [first / spent for spent, first in zip(own, base, strict=True)]
        line = f"  {name:<26} {step * 1e3:7.3f} ms a step, kernels {busy[name]:7.3f}, {batch / step:7.0f} tokens/s"
        if own is not base:
            ratio, low, high = middle(ratios)
            line += f", ratio {ratio:.3f} ({low:.3f} to {high:.3f}; range {min(ratios):.3f} to {max(ratios):.3f})"
        print(line)


def report_shares(shares: dict[str, dict[str, Any]]) -> None:
    """Print attention's share of each arm's kernels, and the longest of them."""
    for name, found in shares.items():
        top = ", ".join(f"{key} {part:.0%}{' *' if own else ''}" for key, part, own in found["top"])
        print(f"  {name:<26} attention (*) {found['share']:.0%} of the kernels' time: {top}", flush=True)


def report_differences(kept: dict[str, Path], other: str) -> None:
    """Print how far the arms' outputs are from the first arm's, and the ratio to those of the arm ``other``."""
    first, *rest = kept
    apart = {name: differences(kept[first], kept[name]) for name in rest}
    own = apart.get(other, {})
    print(f"\napart from {first}: norm of the difference by its own, that of the worst request, largest difference")
    for case in apart[rest[-1]]:
        for name, found in apart.items():
            norm, worst, largest = found[case]
            theirs = own[case][0] if case in own else 0.0
            ratio = f", {norm / theirs:.2f} times vLLM's own two" if theirs else ""
            print(f"  {case:<28} {name:<26} {norm:.2e}, {worst:.2e}, {largest:.2e}{ratio}")
