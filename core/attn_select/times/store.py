"""Files of measurements: where they are, reading them, and appending to one.

Read are the user's cache folder, the files that ``ATTN_SELECT_MEASUREMENTS`` names, and the files that a caller names.
A line that is corrupt is reported and skipped. Of packaged times the models are packaged
(``attn_select.times.fitted``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attn_select.errors import MeasurementError
from attn_select.machine import variables
from attn_select.machine.files import locked
from attn_select.times.measurement import Measurement

SUFFIX = ".jsonl"
Kind = Literal["packaged", "user", "named"]


@dataclass(frozen=True, slots=True)
class MeasurementFile:
    """A file of measurements.

    Attributes:
        kind: ``user`` (of the user's cache folder), ``named`` by a variable or a caller, or ``packaged`` with
            ``attn-select-measure``: those that the packaged models were fitted to.
        path: the file.
    """

    kind: Kind
    path: Path


@dataclass(frozen=True, slots=True)
class StoredMeasurement:
    """A measurement and where it stands.

    Attributes:
        measurement: the figure.
        file: the file that has it.
        line: its line, from 1.
    """

    measurement: Measurement
    file: MeasurementFile
    line: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A line, or a whole file, that could not be read.

    Attributes:
        path: the file.
        line: from 1; None where it is the file.
        message: what was seen and what is accepted.
    """

    path: Path
    line: int | None
    message: str

    def __str__(self) -> str:
        where = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{where}: {self.message}"


@dataclass(frozen=True, slots=True)
class Stored:
    """What was read.

    Attributes:
        measurements: file by file, in the order of their lines.
        problems: what was skipped.
        files: the files that were read.
    """

    measurements: tuple[StoredMeasurement, ...]
    problems: tuple[Problem, ...]
    files: tuple[MeasurementFile, ...]


def user_folder() -> Path | None:
    """Return the folder of the user's own measurements, None where there is no home directory."""
    import platformdirs

    try:
        return platformdirs.user_cache_path("attn-select", appauthor=False) / "measurements"
    except (OSError, RuntimeError):  # no home directory
        return None


def default_file(gpu: str) -> Path | None:
    """Return the user's file for measurements on a GPU, named after it; None where there is no home directory."""
    folder = user_folder()
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"
    return None if folder is None else folder / f"{name}{SUFFIX}"


def measurement_files(named: Sequence[str | os.PathLike[str]] = ()) -> list[MeasurementFile]:
    """Return every file that is read: the user's, ``ATTN_SELECT_MEASUREMENTS``, then ``named``.

    Raises:
        MeasurementError: a named file does not exist, or is a folder.
    """
    folder = user_folder()
    found = [MeasurementFile("user", path) for path in sorted(folder.glob(f"*{SUFFIX}"))] if folder is not None else []
    value = os.environ.get(variables.MEASUREMENTS, "")
    asked = [(variables.MEASUREMENTS, path) for path in value.split(os.pathsep) if path]
    asked += [("--measurements", os.fspath(path)) for path in named]
    for origin, text in asked:
        path = Path(text)
        if not path.is_file():
            seen = "it is a folder" if path.is_dir() else "there is no such file"
            raise MeasurementError(f"{origin} = {text!r}: {seen}", hint="name a file that `attn-select bench` wrote")
        found.append(MeasurementFile("named", path))
    return found


def read_measurements(files: Iterable[MeasurementFile], gpu: str | None = None) -> Stored:
    """Read files of measurements. What cannot be read is in ``problems``.

    Args:
        files: as ``measurement_files`` returns them.
        gpu: the full name of a GPU: lines that do not contain it are passed over, read or not; None reads all.
    """
    found: list[StoredMeasurement] = []
    problems: list[Problem] = []
    files = tuple(files)
    for file in files:
        try:
            content = file.path.read_bytes()
        except OSError as error:
            problems.append(Problem(file.path, None, f"cannot be read: {error.strerror or error}"))
            continue
        stored = measurements_in(content, file, gpu)
        found += stored.measurements
        problems += stored.problems
    return Stored(tuple(found), tuple(problems), files)


def measurements_in(
    content: bytes, file: MeasurementFile, gpu: str | None = None, wanted: Callable[[bytes], bool] = bool
) -> Stored:
    """Read the content of one file, as ``read_measurements`` does; lines that are not ``wanted`` are passed over."""
    found: list[StoredMeasurement] = []
    problems: list[Problem] = []
    spellings = () if gpu is None else {json.dumps(gpu).encode(), json.dumps(gpu, ensure_ascii=False).encode()}
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip() or (spellings and not any([spelling in raw for spelling in spellings])) or not wanted(raw):
            continue
        try:
            measurement = Measurement.from_line(raw.decode("utf-8"))
        except UnicodeDecodeError:
            problems.append(Problem(file.path, number, "not a line of UTF-8"))
        except MeasurementError as error:
            problems.append(Problem(file.path, number, error.message))
        else:
            if gpu is None or measurement.gpu == gpu:
                found.append(StoredMeasurement(measurement, file, number))
    return Stored(tuple(found), tuple(problems), (file,))


def append_measurements(path: Path, measurements: Iterable[Measurement]) -> None:
    """Append measurements to a file, which is made, with its folder, where it does not exist.

    Processes that append to one file take turns. A line that another process left without its end gets one.

    Raises:
        MeasurementError: the file cannot be written.
    """
    lines = "".join(f"{measurement.to_line()}\n" for measurement in measurements).encode()
    if not lines:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            with locked(descriptor):
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    lines = b"\n" + lines
                while lines:
                    lines = lines[os.write(descriptor, lines) :]
        finally:
            os.close(descriptor)
    except OSError as error:
        raise MeasurementError(f"{path} cannot be written: {error.strerror or error}") from None
