"""What the plans of each backend say, for drawn layers on one GPU of each generation.

The words stand in ``tests/wording/BACKEND.txt`` of each plugin. Run ``python tests/decision/wording.py`` after a change
of texts, and read the difference.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import product
from pathlib import Path

from drawn_decisions import drawn_fields

from attn_select import AttentionConfig, ConfigError, select
from attn_select.backends.registry import load_plugins
from attn_select.decide.outcome import Candidate
from attn_select.layer.state import RECURRENCES, StateConfig

ROOT = Path(__file__).resolve().parents[2]
GPUS = ("v100-16gb", "t4", "a100", "l4", "h100", "b200", "b300", "rtx5090")
LAYERS = 1500
NUMBER = re.compile(r"\d+")


def wording() -> dict[str, str]:
    """Return a text per backend: its kernels and paths with the reasons for each, then its notes."""
    kernels: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    notes: dict[str, set[str]] = defaultdict(set)
    draw = random.Random(42)
    drawn = 0
    while drawn < LAYERS:
        try:
            config = AttentionConfig(**drawn_fields(draw))
        except ConfigError:
            continue
        drawn += 1
        _add(select(config, GPUS[drawn % len(GPUS)]).candidates, kernels, notes)
    for recurrence, state_dtype in product(RECURRENCES, ("float32", "bfloat16")):
        layer = StateConfig(recurrence=recurrence, num_heads=4, head_size=128, state_dtype=state_dtype)
        for gpu in ("cpu", *GPUS):
            _add(select(layer, gpu).candidates, kernels, notes)
    return {name: _text({**dict(sorted(paths.items())), "notes": notes[name]}) for name, paths in kernels.items()}


def _add(candidates: Iterable[Candidate], kernels: dict[str, dict[str, set[str]]], notes: dict[str, set[str]]) -> None:
    """Add the words of the plans among the candidates."""
    for candidate in candidates:
        for verdict in candidate.phases.values():
            if (plan := verdict.plan) is not None:
                kernels[candidate.backend][f"{plan.kernel_name}: {plan.path}"].add(plan.because)
                notes[candidate.backend].update(plan.notes)


def kept_in(name: str) -> Path:
    """Return the file with the words of a backend, in the folder of its plugin."""
    package = load_plugins().specs[name].plan.__module__.split(".")[0]
    (folder,) = ROOT.glob(f"plugins/*/{package}")
    return folder.parent / "tests" / "wording" / f"{name}.txt"


def _text(parts: dict[str, set[str]]) -> str:
    """Return the titles with their texts. Of texts that differ in numbers alone, one stands."""
    lines = []
    for title, said in parts.items():
        different = {NUMBER.sub("0", text): text for text in sorted(said)}
        lines += [title, *[f"    {text}" for text in different.values()]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name, text in wording().items():
        kept_in(name).parent.mkdir(exist_ok=True)
        kept_in(name).write_text(text, "utf-8")
