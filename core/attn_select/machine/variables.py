"""The environment variables that attn-select itself reads; ``doctor`` and the README list them."""

from __future__ import annotations

import os

RULES = "ATTN_SELECT_RULES"
CHECK = "ATTN_SELECT_CHECK"
TRACEBACK = "ATTN_SELECT_TRACEBACK"
WORKLOAD = "ATTN_SELECT_WORKLOAD"
ANY_VERSION = "ATTN_SELECT_ANY_VERSION"
STRICT = "ATTN_SELECT_STRICT"
EFFECTS = {
    RULES: "rules files, separated like PATH: above the user's and the working directory's, below --rules",
    CHECK: "1: the runtime checks every batch before a kernel starts; it synchronises with the GPU, so it is slow",
    TRACEBACK: "1: the command line ends an internal error, or a backend's, with its traceback",
    WORKLOAD: "what adapters for engines choose for, as `--workload` takes it: a profile, batches or a file; "
    "observe: watch the engine and write such a file",
    STRICT: "1: adapters for engines end the start where rules or the workload cannot be read, or rules name a backend "
    "that nobody knows",
    ANY_VERSION: "1: adapters for engines take part in releases that they were not run with",
}
"""What each variable does."""


def is_on(switch: str) -> bool:
    """Whether a variable that is a switch is on: 1, or another word than those that people write for off."""
    return os.environ.get(switch, "").lower() not in ("", "0", "false", "no", "off")
