"""Drawn requests of a service: how many tokens each prompt has, and how many are generated."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """What is drawn: prompts log-normal about ``median`` tokens, new tokens evenly."""

    median: int
    shortest: int
    longest: int
    new: tuple[int, int]


KINDS = {
    "mixed": Traffic(1200, 64, 12000, (64, 192)),
    "prefill-heavy": Traffic(3000, 512, 12000, (1, 16)),
    "decode-heavy": Traffic(300, 64, 2000, (256, 512)),
}
SPREAD = 1.0
"""Of the logarithm of a prompt's length."""
FIRST_TOKEN, LAST_TOKEN = 3, 499
"""Of the ids in prompts: every model's vocabulary has them."""


def drawn(kind: str, seed: int, count: int, longest: int | None = None) -> list[tuple[list[int], int]]:
    """Return ``count`` requests, each the ids of its prompt and the number of new tokens; equal for equal arguments.

    Args:
        longest: tokens of a prompt and its new tokens at most, for models that have no room for the kind's own.
    """
    traffic, draw = KINDS[kind], random.Random(f"{kind} {seed}")
    found = []
    for _ in range(count):
        new = draw.randint(*traffic.new)
        length = round(math.exp(draw.gauss(math.log(traffic.median), SPREAD)))
        length = min(max(length, traffic.shortest), traffic.longest)
        if longest is not None:
            new = min(new, longest // 2)
            length = min(length, longest - new)
        found.append(([draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)], new))
    return found


def shared_prefix(tokens: int) -> list[int]:
    """Return so many ids, always the same."""
    draw = random.Random("shared")
    return [draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens)]


def agreement(wanted: list[list[int]], found: list[list[int]]) -> float:
    """Return the share of tokens before the first difference, in the mean over the requests."""
    shares = []
    for ours, theirs in zip(wanted, found, strict=True):
        pairs = enumerate(zip(ours, theirs, strict=True))
        same = next((place for place, (here, there) in pairs if here != there), len(ours))
        shares.append(same / max(1, len(ours)))
    return math.fsum(shares) / len(shares)
