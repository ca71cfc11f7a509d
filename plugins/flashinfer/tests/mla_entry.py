"""Write docs/flashinfer-mla.md: every argument of FlashInfer's MLA entry, who uses it, or why nobody does.

python plugins/flashinfer/tests/mla_entry.py
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "flashinfer-mla.md"
USERS = ("trtllm-gen", "cute-dsl", "xqa", "sparse")
"""What stands behind the entry: ``FLASHINFER_MLA`` has the first and the third, ``FLASHINFER_MLA_CUTE_DSL`` the second,
``FLASHINFER_MLA_SPARSE`` the last (trtllm-gen on 10.x, FlashInfer's own kernel on 12.x)."""


def arguments() -> dict[str, dict[str, str]]:
    """Return what is known of each argument."""
    found: dict[str, dict[str, str]] = tomllib.loads((HERE / "mla_entry.toml").read_text("utf-8"))["arguments"]
    return found


def users(entry: dict[str, str]) -> set[str]:
    """Return which of ``USERS`` pass an argument."""
    used = entry.get("used", "")
    return set(USERS) if used == "all" else {each for each in used.split(", ") if each}


def page() -> str:
    """Return the document."""
    source: Any = tomllib.loads((HERE / "mla_entry.toml").read_text("utf-8"))["source"]
    rows = []
    for name, entry in arguments().items():
        used = entry.get("used", "nobody")
        option = f"`{entry['option']}`" if "option" in entry else ""
        rows.append(
            f"| `{name}` | {entry.get('since', '')} | {used} | {option} | {entry.get('how', entry.get('unused', ''))} |"
        )
    return f"""# FlashInfer's MLA entry

`trtllm_batch_decode_with_kv_cache_mla` has five implementations. Four are called:

| implementation | backend | GPUs |
| --- | --- | --- |
| `trtllm-gen` | `FLASHINFER_MLA`, `FLASHINFER_MLA_SPARSE` | compute capability 10.0 and 10.3 |
| `cute-dsl` | `FLASHINFER_MLA_CUTE_DSL` | 10.0 and 10.3 |
| `xqa` | `FLASHINFER_MLA` | 12.x |
| `sparse` | `FLASHINFER_MLA_SPARSE` | 12.x |

On 9.0 `FLASHINFER_MLA` and `FLASHINFER_MLA_SPARSE` run fa3 by `BatchMLAPagedAttentionWrapper`
instead, sparse layers on pages of one token.

None of the four has run on a GPU here: their calls are held by an emulated entry with the checks of
the real one. The fifth, `cake` (0.7.2, 10.x), is not used: `auto` never takes it. It serves the
shapes on its list alone, reads lengths back from the device for some of them, and makes its lists
anew by tensor operations at each call (mla/cake_trtllm_mla_blackwell.py).

`cute-dsl` ranks behind every backend that ran somewhere, since no one has run it from here. 8 draft
tokens over a million keys took it 359 us, and trtllm-gen 1413 (flashinfer-ai/flashinfer #4390). Ask
for it by `--backend decode=FLASHINFER_MLA_CUTE_DSL`, or by a rule of your own for the contexts and
drafts that you serve:

```toml
[[rules]]
name = "long-drafts"
phase = "decode"
when = {{ mla = true, compute_capability = "10.x", num_speculative_tokens = ">=7", seq_len = ">=262144" }}
prefer = ["FLASHINFER_MLA_CUTE_DSL"]
```

FlashInfer can choose between the two itself (`backend="auto"` inside `flashinfer.autotune`). That
is not used: what it finds differs from run to run and from rank to rank (flashinfer-ai/flashinfer
#3920, sgl-project/sglang #35343). Here they are two backends, so `attn-select tune` measures both,
keeps the times in a file with the GPU and the versions, and every rank that reads the file decides
alike; `explain --workload` shows the times ([times.md](times.md)).

## Its arguments

Read in {source}. An
option stands in the table `[backends.NAME]` of the rules.

| argument | since | passed by | option | how, or why not |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

`python plugins/flashinfer/tests/mla_entry.py` writes this page from `mla_entry.toml` beside it.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
