"""Files of a survey: one line of JSON for each workload, with everything that its times can be judged by.

A line that stands behind another one of the same seed and number replaces it. ``docs/times.md`` lists the keys.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_select.backends.registry import Registry
from attn_select.errors import MeasurementError, printable, shorten
from attn_select.machine.environment import Environment
from attn_select.machine.files import replace_file
from attn_select.times.fingerprint import Fingerprint, present, stale_parts
from attn_select.times.prediction import PACKAGED_FOLDER, SUFFIX, read_survey_file

VERSION = 1  # Of the lines' format
PAIR = " + "  # Between the backend of a step's prefills and that of its decodes, where they differ
Record = dict[str, Any]


def read_survey(path: Path) -> list[Record]:
    """Return a file's workloads in the order of seeds and numbers, an ``.xz`` unpacked; none where there is no file."""
    # The last line may have been cut off by the end of a run: it is left out.
    named = printable(str(path))
    try:
        content = path.read_bytes()
        text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8")
    except FileNotFoundError:
        return []
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise MeasurementError(f"{named}: cannot be read: {error}") from None
    found: dict[tuple[int, int], Record] = {}
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            version = record.pop("v")
            found[record["seed"], record["number"]] = record
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MeasurementError(f"{named}:{number}: no line of a survey: {shorten(line, 60)}") from None
        if version != VERSION:
            raise MeasurementError(f"{named}:{number}: v = {version!r}: accepted is {VERSION}, the format's version")
    return [found[key] for key in sorted(found)]


def times_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the valid times of a workload in us, by backend or by pair of backends."""
    return {each["backend"]: each["time_us"] for each in record["timed"] if each["failure"] is None}


def line_of(record: Mapping[str, Any]) -> str:
    """Return a workload's line."""
    return json.dumps({"v": VERSION, **record}, separators=(",", ":"), allow_nan=False) + "\n"


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a workload's line behind the others, and let it reach the disk."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line_of(record))


def write_survey(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file anew, each workload once, in one step."""
    replace_file(path, "".join(map(line_of, records)).encode())


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> Record:
    """Return a workload's record with the times of ``new`` in place of the same backends' older ones."""
    if old["gpu"] != new["gpu"]:
        text = f"workload {old['number']} was timed on {printable(old['gpu'])}, and this is {new['gpu']}"
        raise MeasurementError(text, hint="name another file: the times of one file are of one GPU")
    names = {timed["backend"] for timed in new["timed"]}
    return {**old, "timed": [*[timed for timed in old["timed"] if timed["backend"] not in names], *new["timed"]]}


@dataclass(slots=True)
class Checked:
    """How many of one backend's times are of the kernels that are here."""

    backend: str  # its name; of two that share steps both
    times: int = 0
    stale: int = 0  # how many are of other kernels than those that are here
    unknown: int = 0  # how many cannot be judged here
    why: dict[str, None] = field(default_factory=dict)  # what is another one, or not known, in words


Judged = tuple[str, Mapping[str, Fingerprint], int]  # What was timed, the fingerprint of each backend, how many times


def recorded_times(records: Iterable[Mapping[str, Any]]) -> Iterator[Judged]:
    """Yield the valid times of a file's workloads."""
    for timed in (timed for record in records for timed in record["timed"] if timed["failure"] is None):
        yield timed["backend"], timed["fingerprint"], 1


def packaged_times() -> Iterator[Judged]:
    """Yield the times of the packaged surveys."""
    for path in PACKAGED_FOLDER.glob(f"*{SUFFIX}"):
        for name, surveyed in read_survey_file(path, path.name).backends.items():
            yield name, {name: surveyed.fingerprint}, surveyed.times


def checked(times: Iterable[Judged], registry: Registry, environment: Environment) -> list[Checked]:
    """Compare fingerprints with the kernels that are here; by name of the backends."""
    found: dict[str, Checked] = {}
    for name, fingerprints, count in times:
        changed, missing = list[str](), list[str]()
        for backend, recorded in fingerprints.items():
            if (spec := registry.specs.get(backend)) is None:
                missing.append(f"no plugin here has {backend}")
                continue
            now = present(recorded, spec, environment)
            changed += stale_parts(backend, recorded, now)
            missing += [f"{part} is not installed here" for part in recorded if part not in now]
        into = found.setdefault(name, Checked(name))
        into.times += count
        into.stale += count if changed else 0
        into.unknown += count if missing and not changed else 0
        into.why |= dict.fromkeys(changed or missing)
    return [found[name] for name in sorted(found)]
