"""The measurements that the packaged models of time were fitted to: compressed files that come with this distribution.

Decisions read the models. ``tune``, the report and ``measurements`` read the times themselves.
"""

from __future__ import annotations

import lzma
import os
from collections.abc import Sequence
from pathlib import Path

from attn_select.times.store import MeasurementFile, Stored, measurement_files, measurements_in, read_measurements

FOLDER = Path(__file__).parent / "measured"


def measured_files() -> list[Path]:
    """Return the files, one for each GPU."""
    return sorted(FOLDER.glob("*.jsonl.xz"))


def measured_lines(path: Path, gpu: str | None = None) -> Stored:
    """Return the measurements of one of ``measured_files``; ``gpu`` as in ``read_measurements``."""
    return measurements_in(lzma.decompress(path.read_bytes()), MeasurementFile("packaged", path), gpu)


def every_measurement(named: Sequence[str | os.PathLike[str]] = (), gpu: str | None = None) -> Stored:
    """Return the measurements of ``measured_files``, then of every file that decisions read.

    Raises:
        MeasurementError: a named file does not exist, or is a folder.
    """
    parts = [
        *(measured_lines(path, gpu) for path in measured_files()),
        read_measurements(measurement_files(named), gpu),
    ]
    return Stored(
        tuple(row for part in parts for row in part.measurements),
        tuple(problem for part in parts for problem in part.problems),
        tuple(file for part in parts for file in part.files),
    )
