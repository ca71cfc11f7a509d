"""Fit the models of all packaged times and write them into the package, so that no first use has to.

    python measure/bench/package_fits.py

Run it when packaged times or the code of the model change. What a model predicts from numbers of six digits differs by
less than a millionth. Models of another code are removed: they would never be read.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from attn_select import AttentionConfig, select
from attn_select.machine.device import find_gpu
from attn_select.times import kept_fits
from attn_select.times.store import PACKAGED_FOLDER

DIGITS = 6


def layers() -> list[tuple[str, AttentionConfig]]:
    """Return every layer of the packaged times, with the name of its GPU."""
    found: dict[tuple[str, str], AttentionConfig] = {}
    for file in sorted(PACKAGED_FOLDER.glob("*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            told = json.loads(line)
            gpu, fields = find_gpu(told["gpu"]), told["config"]
            assert gpu is not None
            found.setdefault((gpu.name, json.dumps(fields, sort_keys=True)), AttentionConfig(**fields))
    return [(gpu, config) for (gpu, _), config in found.items()]


def rounded(value: Any) -> Any:
    """Return plain data with numbers of ``DIGITS`` digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def main() -> None:
    """Fit what decisions ask for, and write it."""
    target = kept_fits.PACKAGED_FITS
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        kept_fits.PACKAGED_FITS = Path(folder)
        for gpu, config in layers():
            select(config, gpu, workload="chat")
        made = sorted(Path(folder, "attn-select", "fits").glob("*.json"))
        for old in target.glob("*.json"):
            old.unlink()
        for path in made:
            _, _, content = path.read_text("utf-8").partition("\n")
            kept_fits.keep(target / path.name, rounded(json.loads(content)))
    size = sum(path.stat().st_size for path in target.glob("*.json"))
    print(f"{len(made)} models, {size >> 10} KiB in {target}")


if __name__ == "__main__":
    main()
