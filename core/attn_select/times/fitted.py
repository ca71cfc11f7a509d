"""Fitted models of time: packaged ones, and models that ``attn-select-measure`` fitted to the user's own times.

A packaged model stands in a file of its GPU, with everything that is needed to judge what it predicts. One of the
user's own is found by a digest of all that it was made from: the points, the layer, the device and the code that
predicts. Nothing else is ever taken for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_select.layer.config import Phase
from attn_select.machine.device import Device
from attn_select.machine.files import replace_file
from attn_select.times.batch_shape import BatchShape
from attn_select.times.measurement import Method
from attn_select.times.store import user_folder
from attn_select.times.timed_layer import CONFIG, TimedLayer

if TYPE_CHECKING:
    from attn_select.times.model import TimeModel

logger = logging.getLogger(__name__)
PACKAGED_FOLDER = Path(__file__).parent / "fits"
"""One file for each GPU, a model in each line; ``measure/bench/package_fits.py`` writes them."""
_CODE = ("model.py", "terms.py", "state_terms.py", "roofline.py", "state_work.py")


@dataclass(frozen=True)
class PackagedFit:
    """The model of one backend's kernels on one GPU for one kind of layer.

    Attributes:
        gpu: its full name as the driver says it.
        backend: name of the backend.
        kernel: name of the kernel by phase.
        config: the fields of the layer (``attn_select.times.timed_layer``).
        libraries: version by distribution that the times were measured with.
        method: how the times were taken.
        source: of the times; ``measured`` is ``attn-select bench``.
        date: of the last one, ISO 8601.
        digest: of the times that the model was fitted to.
        code: digest of the code that it is for.
        data: the model as ``TimeModel.to_dict`` writes it.
        path: the file that it comes from.
    """

    gpu: str
    backend: str
    kernel: Mapping[Phase, str]
    config: Mapping[str, Any]
    libraries: Mapping[str, str]
    method: Method
    source: str
    date: str
    digest: str
    code: str
    data: Mapping[str, Any]
    path: Path

    @cached_property
    def model(self) -> TimeModel:
        """The model."""
        from attn_select.times.model import TimeModel

        return TimeModel.from_dict(self.data)


def packaged_fits(layer: TimedLayer) -> list[PackagedFit]:
    """Return every packaged model of a layer, of all GPUs."""
    fields = layer.to_dict()
    return [PackagedFit(**json.loads(line), path=path) for path, of, line in _lines() if of == fields]


@cache
def _lines() -> list[tuple[Path, dict[str, Any], bytes]]:
    """Return the lines of all files with the fields of their layers: a line is long, and few are asked for."""
    found = []
    for path in sorted(PACKAGED_FOLDER.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            written = CONFIG.search(line)
            assert written is not None
            found.append((path, json.loads(written[1]), line))
    return found


def kept_model(points: Sequence[tuple[BatchShape, float]], layer: TimedLayer, device: Device) -> TimeModel | None:
    """Return the model that was fitted to these points and kept in the user's cache folder; None where none was.

    A damaged file counts as none.

    Args:
        points: batches and their times in us.
        layer: the kind of layer.
        device: that the times were measured on.
    """
    from attn_select.times.model import TimeModel  # what was measured itself needs no model

    path = kept_file(points, layer, device)
    content = None if path is None else _read(path)
    return None if content is None else TimeModel.from_dict(json.loads(content))


def keep(path: Path, model: Mapping[str, Any]) -> None:
    """Write what ``TimeModel.to_dict`` returns.

    Raises:
        OSError: the file cannot be written.
    """
    content = json.dumps(model).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, _digest(content) + content)


def kept_file(points: Sequence[tuple[BatchShape, float]], layer: TimedLayer, device: Device) -> Path | None:
    """Return where the model of these points is kept; None where there is no home directory."""
    made_from = [sorted((str(batch), time_us) for batch, time_us in points), layer.fields, device.sm_count, code()]
    name = f"{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]}.json"
    folder = user_folder()
    return None if folder is None else folder.parent / "fits" / name


def _read(path: Path) -> bytes | None:
    """Return the content of a kept model, None where there is none or its digest, which begins the file, is another."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    size = len(_digest(b""))
    if found[:size] == _digest(found[size:]):
        return found[size:]
    logger.info("%s is damaged: `attn-select measurements fit` writes it again", path)
    return None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


@cache
def code() -> str:
    """Return a digest of the code that predicts: the models of another release do not count."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join([(folder / name).read_bytes() for name in _CODE])).hexdigest()
