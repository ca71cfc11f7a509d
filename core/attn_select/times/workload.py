"""``Workload``: the batch shapes that a layer is to be fast at, each with its share of the steps."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from attn_select.errors import ConfigError, UnknownNameError, printable, show
from attn_select.layer.config import PHASES, Phase
from attn_select.layer.layer_config import LayerConfig
from attn_select.machine.files import read_bounded
from attn_select.times.batch_shape import BatchShape, RequestGroup, parse_batch_shape
from attn_select.times.roofline import is_decode

PROFILES: dict[str, str] = tomllib.loads(Path(__file__).with_name("profiles.toml").read_text("utf-8"))
"""The shapes of named workloads."""

DEFAULT_MIX = "default"
"""The profile that is chosen for where no workload is named."""
_SHARES = "a share is a number above 0, such as 64q1s4k*0.8"
_MOST_SHAPES = 1000
MAX_BYTES = 1 << 18
"""Of a workload's file."""


@dataclass(frozen=True, slots=True)
class WeightedShape:
    """A batch shape and its share of the workload's steps, from 0 to 1."""

    batch: BatchShape
    weight: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Weighted batch shapes; the time of a workload is the weighted sum of theirs.

    Weights become shares: they sum to 1. Shapes that are given twice become one.

    Attributes:
        name: the profile's or file's name, or the shapes as text.
        shapes: each batch shape once, as first given.

    Raises:
        ConfigError: no shape, more than 1000, or a weight that is not a finite number above 0.
    """

    name: str
    shapes: tuple[WeightedShape, ...]

    def __post_init__(self) -> None:
        weights: dict[BatchShape, float] = {}
        for shape in self.shapes:
            weight = shape.weight
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
                raise ConfigError(f"weight = {show(weight)} of {shape.batch}: {_SHARES}", fields=["weight"])
            weights[shape.batch] = weights.get(shape.batch, 0.0) + weight
        if not 1 <= len(weights) <= _MOST_SHAPES:
            text = f"shapes has {len(weights)} batch shapes: a workload has from 1 to {_MOST_SHAPES}"
            raise ConfigError(text, fields=["shapes"])
        most = max(weights.values())  # so that no sum overflows
        total = math.fsum([weight / most for weight in weights.values()])
        shares = [WeightedShape(batch, weight / most / total) for batch, weight in weights.items()]
        object.__setattr__(self, "shapes", tuple(shares))

    def __str__(self) -> str:
        if len(self.shapes) == 1:
            return str(self.shapes[0].batch)
        return ",".join(f"{shape.batch}*{shape.weight:.4g}" for shape in self.shapes)

    def to_dict(self) -> dict[str, Any]:
        """Return the workload as plain data; ``docs/json.md`` documents it."""
        shapes = [{"batch": str(shape.batch), "share": shape.weight} for shape in self.shapes]
        return {"name": self.name, "shapes": shapes}

    def of_phase(self, phase: Phase, config: LayerConfig) -> tuple[WeightedShape, ...]:
        """Return the shapes that a layer runs in a phase.

        A shape is decode where no request has more new tokens than 1 plus the layer's speculative tokens, else prefill:
        a mixed batch counts as prefill. Layers without a cache have prefills alone.
        """
        return tuple([shape for shape in self.shapes if phases_of(shape.batch, config)[0] == phase])


def phases_of(batch: BatchShape, config: LayerConfig) -> tuple[Phase, ...]:
    """Return the phases that a layer's requests of a batch are in, prefill first."""
    decodes = [is_decode(config, group.query_len) for group in batch.groups]
    here = {"prefill": not all(decodes), "decode": any(decodes)}
    return tuple([phase for phase in PHASES if here[phase]])


@cache
def default_mix(config: LayerConfig, profile: str = DEFAULT_MIX) -> Workload:
    """Return what a layer is chosen for where no workload is named: a profile, its decodes with the layer's drafts."""
    new = config.max_decode_query_len if config.has_cache else 1
    shapes = []
    for shape in _shapes(PROFILES[profile]):
        groups = [
            RequestGroup(each.count, new, max(new, each.seq_len)) if each.query_len == 1 else each
            for each in shape.batch.groups
        ]
        shapes.append(WeightedShape(BatchShape(tuple(groups)), shape.weight))
    return Workload(profile, tuple(shapes))


WorkloadArgument = Workload | str | PurePath


def parse_workload(given: WorkloadArgument) -> Workload:
    """Read a workload.

    Args:
        given: shapes with shares (``64q1s4k*0.8,q2k*0.2``; without shares all count alike), the name of a profile
            (``PROFILES``), or a TOML file (a path object, or text that ends in ``.toml``) with ``[[shapes]]`` tables of
            ``batch`` and ``weight``, and optionally ``name``. A ``Workload`` is returned as it is.

    Raises:
        ConfigError: shapes, shares or a file that cannot be read; it names them.
        UnknownNameError: a name that is no profile.
    """
    if isinstance(given, Workload):
        return given
    if isinstance(given, PurePath):
        return _from_file(Path(given))
    if not isinstance(given, str):
        raise ConfigError(f"workload = {show(given)}: expected shapes, a profile or a file", fields=["workload"])
    text = given.strip()
    if text.lower().endswith(".toml"):
        return _from_file(Path(text).expanduser())
    profile = text.lower().replace("_", "-")
    if profile in PROFILES:
        return Workload(profile, _shapes(PROFILES[profile]))
    if not text[:1].isdigit() and text[:1] not in ("q", "Q"):
        hint = f"valid: {', '.join(PROFILES)}, shapes such as 64q1s4k*0.8,q2k*0.2, or a file NAME.toml"
        raise UnknownNameError("workload", given, PROFILES, hint=hint)
    shapes = _shapes(text)
    return Workload(str(Workload("", shapes)), shapes)


def _shapes(text: str) -> tuple[WeightedShape, ...]:
    found: list[WeightedShape] = []
    for part in text.split(","):
        written, star, share = part.partition("*")
        try:
            weight = float(share) if star else 1.0
        except ValueError:
            raise ConfigError(f"weight = {show(share)} of {show(written)}: {_SHARES}", fields=["weight"]) from None
        found.append(WeightedShape(parse_batch_shape(written), weight))
    return tuple(found)


def _from_file(path: Path) -> Workload:
    where = f"workload file {printable(str(path))}"
    try:
        document = tomllib.loads(read_bounded(path, MAX_BYTES).decode("utf-8"))
    except OSError as error:
        text = f"{where}: cannot be read: {error.strerror or error}"
        raise ConfigError(text, fields=["workload"]) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8: save it as UTF-8", fields=["workload"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML ({error})", fields=["workload"]) from None
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", fields=["workload"]) from None
    try:
        return _from_document(document, path.stem)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", fields=error.fields, hint=error.hint) from None


def _from_document(document: dict[str, Any], name: str) -> Workload:
    _only(document, ("name", "shapes"), "the file")
    name, tables = document.get("name", name), document.get("shapes")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"name = {show(name)}: expected text", fields=["name"])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"shapes = {show(tables)}: expected [[shapes]] tables", fields=["shapes"])
    shapes: list[WeightedShape] = []
    for number, table in enumerate(tables, 1):
        try:
            _only(table, ("batch", "weight"), f"shape {number}")
            shapes.append(WeightedShape(parse_batch_shape(table.get("batch")), table.get("weight", 1.0)))
        except ConfigError as error:
            raise ConfigError(f"shape {number}: {error.message}", fields=error.fields, hint=error.hint) from None
    return Workload(printable(name), tuple(shapes))


def _only(table: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in keys:
            hint = UnknownNameError("key", key, keys).hint
            raise ConfigError(f"unknown key {show(key)}; {where} takes {', '.join(keys)}", fields=[key], hint=hint)
