"""Models of time that were fitted before, kept in the user's cache folder: fitting takes longer than a decision may.

A kept model is found by a digest of all that it was made from: the points, the layer, the device and the code that
fits. Nothing else is ever taken for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from attn_select.machine.device import Device
from attn_select.machine.files import replace_file
from attn_select.times.batch_shape import BatchShape
from attn_select.times.store import user_folder
from attn_select.times.timed_layer import TimedLayer

if TYPE_CHECKING:
    from attn_select.times.model import TimeModel

logger = logging.getLogger(__name__)
_CODE = ("model.py", "terms.py", "least_squares.py", "points.py", "roofline.py")


def kept_or_fitted(points: Sequence[tuple[BatchShape, float]], layer: TimedLayer, device: Device) -> TimeModel:
    """Return the model of these points, read where it was kept, else fitted and kept.

    A folder that cannot be read or written, or a damaged file in it, costs time, nothing else. Arguments as in
    ``attn_select.times.model.fit``.
    """
    from attn_select.times.model import TimeModel, fit  # what was measured itself needs no model

    path = _path(points, layer, device)
    if path is not None and (content := _kept(path)) is not None:
        return TimeModel.from_dict(json.loads(content))
    model = fit(points, layer, device)
    if path is not None:
        content = json.dumps(model.to_dict()).encode()
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, _digest(content) + content)
    return model


def _kept(path: Path) -> bytes | None:
    """Return the content of a kept model, None where there is none or its digest, which begins the file, is another."""
    try:
        found = path.read_bytes()
    except OSError:
        return None
    size = len(_digest(b""))
    if found[:size] == _digest(found[size:]):
        return found[size:]
    logger.info("%s is damaged: the model of times is fitted anew", path)
    return None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


def _path(points: Sequence[tuple[BatchShape, float]], layer: TimedLayer, device: Device) -> Path | None:
    folder = user_folder()
    if folder is None:
        return None
    made_from = [sorted((str(batch), time_us) for batch, time_us in points), layer.fields, device.sm_count, _code()]
    return folder.parent / "fits" / f"{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]}.json"


@cache
def _code() -> str:
    """Return a digest of the code that fits: another release's models are not this one's."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join([(folder / name).read_bytes() for name in _CODE])).hexdigest()
