"""Fit the models of the packaged times and write them into core, one file for each GPU.

    python measure/bench/package_fits.py

The times are those of ``attn_select_measure/measured``. Run it when they change, or the code of the model: with the
same numpy and scipy the same file comes out. Numbers have six digits, which changes a prediction by less than a
millionth.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from attn_select.times.fitted import PACKAGED_FOLDER, code
from attn_select.times.known_times import KnownTimes
from attn_select.times.model import TimeModel
from attn_select_measure.fitting.keeping import known_times
from attn_select_measure.measured_lines import measured_files, measured_lines

DIGITS = 6


def rounded(value: Any) -> Any:
    """Return plain data with numbers of ``DIGITS`` digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def row(known: KnownTimes, model: TimeModel) -> dict[str, Any]:
    """Return a model as ``attn_select.times.fitted.PackagedFit`` reads it."""
    one = next(each for measured in known.measured.values() for each in measured)
    return {
        "gpu": one.gpu,
        "backend": one.backend,
        "kernel": dict(known.kernel),
        "config": known.layer.to_dict(),
        "libraries": dict(known.libraries),
        "method": one.method,
        "source": one.source,
        "date": known.date,
        "digest": known.digest,
        "code": code(),
        "data": rounded(model.to_dict()),
    }


def packaged() -> dict[str, str]:
    """Return the content of every file of packaged models, by name."""
    found = {}
    for path in measured_files():
        fits = []
        for known in known_times(measured_lines(path).measurements):
            model = known.model
            if model is not None and (model.decode or model.prefill):
                fits.append(json.dumps(row(known, model), separators=(",", ":")))
        found[path.name.removesuffix(".xz")] = "".join(f"{line}\n" for line in fits)
    return found


def main() -> None:
    """Write every file, and say how large it is."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        files = packaged()
    PACKAGED_FOLDER.mkdir(exist_ok=True)
    for name, content in files.items():
        path = Path(PACKAGED_FOLDER, name)
        path.write_text(content, "utf-8")
        print(f"{path}: {len(content.splitlines())} models, {len(content) >> 10} KiB")


if __name__ == "__main__":
    main()
