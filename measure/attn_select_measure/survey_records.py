"""Files of a survey: one line of JSON for each workload, with everything that its times can be judged by.

A line that stands behind another one of the same seed and number replaces it. ``docs/times.md`` lists the keys.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_select.backends.registry import Registry
from attn_select.errors import MeasurementError, shorten
from attn_select.machine.environment import Environment
from attn_select.machine.files import replace_file
from attn_select.times.fingerprint import present, stale_parts

VERSION = 1
"""Of the lines' format."""
Record = dict[str, Any]


def read_survey(path: Path) -> list[Record]:
    """Return a file's workloads in the order of seeds and numbers; none where there is no file.

    The last line may have been cut off by the end of a run: it is left out.

    Raises:
        MeasurementError: the file cannot be read, or a line is not one of a survey.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementError(f"{path}: cannot be read: {error}") from None
    found: dict[tuple[int, int], Record] = {}
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            record = json.loads(line)
            version = record.pop("v")
            found[record["seed"], record["number"]] = record
        except (ValueError, KeyError, TypeError, AttributeError):
            raise MeasurementError(f"{path}:{number}: no line of a survey: {shorten(line, 60)}") from None
        if version != VERSION:
            raise MeasurementError(f"{path}:{number}: v = {version!r}: accepted is {VERSION}, the format's version")
    return [found[key] for key in sorted(found)]


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
    """Return a workload's record with the times of ``new`` in place of the same backends' older ones.

    Raises:
        MeasurementError: they are of two GPUs.
    """
    if old["gpu"] != new["gpu"]:
        text = f"workload {old['number']} was timed on {old['gpu']}, and this is {new['gpu']}"
        raise MeasurementError(text, hint="name another file: the times of one file are of one GPU")
    names = {timed["backend"] for timed in new["timed"]}
    return {**old, "timed": [*[timed for timed in old["timed"] if timed["backend"] not in names], *new["timed"]]}


@dataclass(frozen=True, slots=True)
class Checked:
    """What is to be said of one backend's times.

    Attributes:
        backend: its name; of two that share steps both.
        times: how many there are.
        stale: how many are of other kernels than those that are here.
        unknown: how many cannot be judged here.
        why: what is another one, or not known, in words.
    """

    backend: str
    times: int
    stale: int
    unknown: int
    why: tuple[str, ...]


def check_survey(records: Sequence[Record], registry: Registry, environment: Environment) -> list[Checked]:
    """Compare every time's fingerprint with the kernels that are here; by name of the backends."""
    times, stale, unknown = Counter[str](), Counter[str](), Counter[str]()
    why: dict[str, dict[str, None]] = {}
    for timed in (timed for record in records for timed in record["timed"] if timed["failure"] is None):
        name = timed["backend"]
        times[name] += 1
        changed: list[str] = []
        missing: list[str] = []
        for backend, recorded in timed["fingerprint"].items():
            spec = registry.specs.get(backend)
            if spec is None:
                missing.append(f"no plugin here has {backend}")
                continue
            now = present(recorded, spec, environment)
            changed += stale_parts(recorded, now)
            missing += [f"{part} is not installed here" for part in recorded if part not in now]
        stale[name] += bool(changed)
        unknown[name] += bool(missing) and not changed
        why.setdefault(name, {}).update(dict.fromkeys(changed or missing))
    return [Checked(name, times[name], stale[name], unknown[name], tuple(why[name])) for name in sorted(times)]
