"""A golden file of ``attn-select diff``: what ``attn-select explain --json`` wrote earlier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from attn_select.errors import ConfigError, shorten, show
from attn_select.machine.files import read_bounded
from attn_select_cli.diff import compare

MAX_BYTES = 1 << 24
"""Of a golden file; one of a model with many kinds of layers has 200 KB."""


def changes_since(path: str, after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what changes from the decisions in a golden file."""
    problem = "expected schema_version 1 and a layer"
    try:
        before = json.loads(read_bounded(path, MAX_BYTES))
        if before["schema_version"] == 1 and before["layers"]:
            return compare(before, after)
    except OSError as error:
        problem = error.strerror or shorten(error)
    except RecursionError:
        problem = "nested too deeply"
    except ValueError as error:  # no JSON, too large, no regular file, a null byte in the path
        problem = shorten(error)
    except KeyError as error:
        problem = f"{show(error.args[0])} is missing"
    except (TypeError, AttributeError, IndexError) as error:  # a value of another type
        problem = f"not what `explain --json` writes ({shorten(error)})"
    raise ConfigError(
        f"golden = {show(path, 1000)}: {problem}",
        fields=["golden"],
        hint="a golden file is what `attn-select explain --json` writes for one model on one GPU",
    )
