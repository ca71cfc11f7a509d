"""Files of a survey: one line of JSON for each workload, with everything that its times can be judged by.

A line that stands behind another one of the same seed and number replaces it. ``docs/times.md`` lists the keys.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_select.backends.registry import Registry
from attn_select.errors import MeasurementError, printable, shorten
from attn_select.machine.environment import Environment
from attn_select.machine.files import replace_file
from attn_select.times.evidence import known_stale
from attn_select.times.fingerprint import present, stale_parts
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


@dataclass(frozen=True, slots=True)
class Checked:
    """What is to be known_why of one backend's times."""

    backend: str  # its name; of two that share steps both
    times: int
    stale: int  # how many are of other kernels than those that are here
    unknown: int  # how many cannot be judged here
    why: tuple[str, ...]  # what is another one, or not known, in words
    known: str = ""  # why it is known to be stale, with the date; empty where it is not


def check_survey(records: Sequence[Record], registry: Registry, environment: Environment) -> list[Checked]:
    """Compare every time's fingerprint with the kernels that are here; by name of the backends."""
    found: dict[str, list[tuple[list[str], list[str]]]] = {}
    for timed in (timed for record in records for timed in record["timed"] if timed["failure"] is None):
        each = [_judged(name, recorded, registry, environment) for name, recorded in timed["fingerprint"].items()]
        changed, missing = ([text for pair in each for text in pair[part]] for part in (0, 1))
        found.setdefault(timed["backend"], []).append((changed, missing))
    checked = []
    for name, judged in sorted(found.items()):
        stale = sum(bool(changed) for changed, _ in judged)
        unknown = sum(bool(missing) and not changed for changed, missing in judged)
        why = dict.fromkeys(text for changed, missing in judged for text in changed or missing)
        checked.append(Checked(name, len(judged), stale, unknown, tuple(why)))
    return checked


def check_packaged(registry: Registry, environment: Environment) -> list[Checked]:
    """Compare the fingerprints of the packaged times with the kernels that are here; by file and name."""
    known = known_stale()
    found = []
    for path in sorted(PACKAGED_FOLDER.glob(f"*{SUFFIX}")):
        for name, surveyed in sorted(read_survey_file(path, path.name).backends.items()):
            changed, missing = _judged(name, surveyed.fingerprint, registry, environment)
            why = f"{known[name]['reason']} ({known[name]['date']})" if changed and name in known else ""
            counts = surveyed.times, surveyed.times * bool(changed), surveyed.times * (bool(missing) and not changed)
            found.append(Checked(name, *counts, tuple(changed or missing), why))
    return found


def _judged(
    name: str, recorded: Mapping[str, str], registry: Registry, environment: Environment
) -> tuple[list[str], list[str]]:
    """Return what of a fingerprint is another one here, and what is not known, in words."""
    spec = registry.specs.get(name)
    if spec is None:
        return [], [f"no plugin here has {name}"]
    now = present(recorded, spec, environment)
    return stale_parts(name, recorded, now), [f"{part} is not installed here" for part in recorded if part not in now]
