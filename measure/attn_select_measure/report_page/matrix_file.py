"""Reads what ``attn-select matrix --json`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from attn_select.errors import ConfigError, show
from attn_select.machine.files import read_bounded


class MatrixCell(BaseModel):
    """One cell: the backend of each phase of one layer kind of a model on a GPU."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None
    gpu: str
    kind: str
    count: int
    selected: dict[Literal["prefill", "decode"], str | None] = Field(min_length=1)


class _Matrix(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    schema_version: Literal[1]
    cells: list[MatrixCell] = Field(min_length=1)


MAX_BYTES = 1 << 26
"""Of a matrix; one cell has less than 200 bytes."""


def read_matrix(path: Path) -> list[MatrixCell]:
    """Return the cells of a matrix.

    Raises:
        ConfigError: the file cannot be read, is not JSON or has another shape; names the first field that is wrong.
    """
    try:
        return _Matrix.model_validate_json(read_bounded(path, MAX_BYTES)).cells
    except OSError as error:
        problem = error.strerror or "cannot be read"
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        problem = f"{where}: {first['msg']}"
    except ValueError as error:
        problem = str(error)
    raise ConfigError(
        f"matrix = {show(str(path), 1000)}: {problem}",
        fields=["matrix"],
        hint="a matrix is what `attn-select matrix --json` writes",
    )
