"""Models of time that were fitted before: of packaged times they come with this project, others are kept in the user's
cache folder. Fitting takes longer than a decision may.

A kept model is found by a digest of all that it was made from: the points, the layer, the device and the code that
fits. Nothing else is ever taken for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_select.machine.device import Device
from attn_select.machine.files import replace_file
from attn_select.times.batch_shape import BatchShape
from attn_select.times.store import user_folder
from attn_select.times.timed_layer import TimedLayer

if TYPE_CHECKING:
    from attn_select.times.model import TimeModel

logger = logging.getLogger(__name__)
PACKAGED_FITS = Path(__file__).parent / "fits"
"""Of the packaged times; ``measure/bench/package_fits.py`` writes them."""
_CODE = ("model.py", "terms.py", "least_squares.py", "points.py", "roofline.py")


def kept_or_fitted(points: Sequence[tuple[BatchShape, float]], layer: TimedLayer, device: Device) -> TimeModel:
    """Return the model of these points, read where it is packaged or was kept, else fitted and kept.

    A folder that cannot be read or written, or a damaged file in it, costs time, nothing else. Arguments as in
    ``attn_select.times.model.fit``.
    """
    from attn_select.times.model import TimeModel, fit  # what was measured itself needs no model

    name, folder = _name(points, layer, device), user_folder()
    own = None if folder is None else folder.parent / "fits" / name
    for path in (PACKAGED_FITS / name, own):
        if path is not None and (content := _kept(path)) is not None:
            return TimeModel.from_dict(json.loads(content))
    model = fit(points, layer, device)
    if own is not None:
        with contextlib.suppress(OSError):
            keep(own, model.to_dict())
    return model


def keep(path: Path, model: Mapping[str, Any]) -> None:
    """Write what ``TimeModel.to_dict`` returns.

    Raises:
        OSError: the file cannot be written.
    """
    content = json.dumps(model).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, _digest(content) + content)


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


def _name(points: Sequence[tuple[BatchShape, float]], layer: TimedLayer, device: Device) -> str:
    """Return the name of the file with the model of these points: a digest of all that it is made from."""
    made_from = [sorted((str(batch), time_us) for batch, time_us in points), layer.fields, device.sm_count, _code()]
    return f"{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]}.json"


@cache
def _code() -> str:
    """Return a digest of the code that fits: another release's models are not this one's."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join([(folder / name).read_bytes() for name in _CODE])).hexdigest()
