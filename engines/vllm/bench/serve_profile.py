"""Where the GPU's time of a serving run goes, by what its kernels do."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

GROUPS = {  # what a kernel does, by words in its name; the first that fits
    "caches and copies": re.compile(r"cache|memcpy|memset|concat|gather|slot", re.I),
    "products": re.compile(r"gemm|gemv|nvjet|splitk|cublas", re.I),
    "attention": re.compile(r"flash|fmha|attn|attention|attend|decode|prefill|mla|merge|batch_", re.I),
}


def device_times(profile: Any) -> dict[str, Any]:
    """Return what a run of ``torch.profiler`` saw: the ``busy`` seconds of the device, and seconds by kernel."""
    kernels: Counter[str] = Counter()
    spans = []
    for event in profile.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and event.duration_ns():
            kernels[event.name()] += event.duration_ns()
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    busy = end = 0
    for first, last in sorted(spans):
        busy += max(0, last - max(first, end))
        end = max(end, last)
    return {"busy": busy / 1e9, "kernels": {name: time / 1e9 for name, time in kernels.most_common(60)}}


def told(seen: dict[str, Any], seconds: float) -> str:
    """Say in one line where a run's seconds go, with what ``device_times`` saw of such a run."""
    groups: Counter[str] = Counter()
    for name, time in seen["kernels"].items():
        groups[next((group for group, words in GROUPS.items() if words.search(name)), "other kernels")] += time
    parts = [f"{group} {time:.2f} s" for group, time in groups.most_common()]
    return f"{seconds:.2f} s, of which the GPU is busy {seen['busy']:.2f}: {', '.join(parts)}"
