"""The backends that are known by name even where their plugin is not installed, and how to install a plugin."""

from __future__ import annotations

import os
from pathlib import Path

DISTRIBUTIONS = {
    "FLASH_ATTN": "attn-select-flash-attn",
    "FLASH_ATTN_MLA": "attn-select-flash-attn",
    "FLASHINFER": "attn-select-flashinfer",
    "FLASHINFER_MLA": "attn-select-flashinfer",
    "FLASHINFER_MLA_SPARSE": "attn-select-flashinfer",
    "FLASHMLA": "attn-select-flashmla",
    "FLASHMLA_SPARSE": "attn-select-flashmla",
    "CUTLASS_MLA": "attn-select-cutlass-mla",
    "TRITON_ATTN": "attn-select-triton",
    "TRITON_MLA": "attn-select-triton",
    "PAGED_ATTENTION": "attn-select-triton",
    "TORCH_SDPA": "attn-select-torch",
    "FLEX_ATTENTION": "attn-select-torch",
    "TORCH_MLA": "attn-select-torch",
}
"""Backend name → distribution that registers it."""


NOT_ON_AN_INDEX = (
    "attn-select and its plugins are on no package index yet. `make dist` in a clone of the repository builds their "
    "wheels into its folder dist; with PIP_FIND_LINKS=/path/to/dist in the environment, `pip install` finds them there."
)
NEEDS_GPU = "needs a GPU machine"
"""What is said of the install command of a kernel library that is of no use without a GPU."""


def install_command(distribution: str) -> str:
    """Return the command that installs one of this project's plugins: by its folder in a clone, elsewhere by name.

    Outside a clone it needs what ``NOT_ON_AN_INDEX`` says.
    """
    import shlex  # only needed where a plugin is missing

    folder = folder_in_clone(distribution)
    return f"pip install {distribution if folder is None else shlex.quote(folder)}"


def folder_in_clone(distribution: str) -> str | None:
    """Return the folder of a plugin in the clone that this package runs from, None where it was installed otherwise.

    The path is relative (``./plugins/torch``) where the clone is the working directory.
    """
    clone = Path(__file__).resolve().parents[2]
    folder = clone / "plugins" / distribution.removeprefix("attn-select-").replace("-", "_")
    if not (folder / "pyproject.toml").is_file():
        return None
    return f"./{folder.relative_to(clone)}" if os.path.realpath(os.curdir) == str(clone) else str(folder)
