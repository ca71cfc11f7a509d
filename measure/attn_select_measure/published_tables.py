"""Published tables of attention times, read from an installed ``aiconfigurator-core``.

That package (Apache-2.0, NVIDIA) holds times that its authors measured through vLLM, SGLang and TensorRT-LLM, as
parquet files. ``table_labels.json`` says which of their kernels are kernels of a backend here, and why others are
left out. The times come from repeated runs on the same data, so that what fits into the L2 is read from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attn_select.errors import ConfigError, MeasurementError
from attn_select.layer.config import AttentionConfig
from attn_select.machine.device import Device, find_gpu
from attn_select.times.batch_shape import BatchShape, RequestGroup
from attn_select.times.measurement import Measurement
from attn_select.times.timed_layer import timed_layer

DISTRIBUTION = "aiconfigurator-core"
INSTALL = "pip install 'attn-select-measure[tables]'"
_DATA = Path(__file__).parent / "table_labels.json"
_FILES = ("context_attention_perf.parquet", "generation_attention_perf.parquet")
_KV_DTYPES = {"bfloat16": "auto", "fp8": "fp8_e4m3"}


@dataclass(frozen=True, slots=True)
class Label:
    """What one label of the tables means.

    Attributes:
        framework: the engine that the times were measured through.
        label: as the tables have it (column ``kernel_source``).
        capability: prefix of the compute capabilities for which this holds; empty: all.
        backend: name of the backend; empty where the times are left out.
        kernel: stable name of its kernel.
        source: how that is known.
        excluded: why the times are left out.
    """

    framework: str
    label: str
    capability: str
    backend: str = ""
    kernel: str = ""
    source: str = ""
    excluded: str = ""


@dataclass(slots=True)
class Table:
    """What was read of one table.

    Attributes:
        measurements: its usable rows, without repetitions.
        left_out: number of rows by the reason why they are not used.
    """

    measurements: list[Measurement] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def labels() -> tuple[Label, ...]:
    """Return what the labels mean, in the order in which they are tried."""
    return tuple(Label(**row) for row in _data()["labels"])


def excluded_folders() -> dict[str, str]:
    """Return the folders of the package that are not read, each with the reason."""
    found: dict[str, str] = _data()["excluded_folders"]
    return found


def _data() -> dict[str, Any]:
    with open(_DATA, "rb") as file:
        data: dict[str, Any] = json.load(file)
    return data


def installed() -> tuple[Path, str]:
    """Return the folder of the installed tables and their version.

    Raises:
        MeasurementError: ``aiconfigurator-core`` is not installed, or has no tables.
    """
    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise MeasurementError(f"{DISTRIBUTION} is not installed", hint=INSTALL)
    folder = Path(spec.submodule_search_locations[0]) / "systems" / "data"
    if not folder.is_dir():
        raise MeasurementError(f"{folder} does not exist: this release of {DISTRIBUTION} is laid out otherwise")
    return folder, metadata.version(DISTRIBUTION)


def table_files(folder: Path, framework: str | None = None) -> Iterator[tuple[str, str, Path]]:
    """Yield ``(framework, version, file)`` of every attention table below ``folder`` whose format is known."""
    for path in sorted(folder.glob("*/attention/*/*/*.parquet")):
        _, _, engine, version, name = path.relative_to(folder).parts
        if name in _FILES and framework in (None, engine):
            yield engine, version, path


def gpu_of(path: Path) -> Device | None:
    """Return the GPU of the data file that a table was measured on; None where it is none of them."""
    parquet = _parquet()
    column = parquet.ParquetFile(path).read_row_group(0, columns=["device"]).column("device")
    return find_gpu(column[0].as_py())


def read_table(
    path: Path, framework: str, version: str, package_version: str, known: Sequence[Label] | None = None
) -> Table:
    """Read one parquet file; arguments and result as ``from_columns`` has them.

    Raises:
        MeasurementError: the file lacks a column, or ``pyarrow`` is not installed.
    """
    table = _parquet().read_table(path)
    if missing := [name for name in _COLUMNS if name not in table.column_names]:
        raise MeasurementError(f"{os.fspath(path)} lacks the column {', '.join(missing)}")
    names = [name for name in (*_COLUMNS, _WINDOW) if name in table.column_names]
    return from_columns(table.select(names).to_pydict(), framework, version, package_version, known)


def from_columns(
    columns: Mapping[str, Sequence[Any]],
    framework: str,
    version: str,
    package_version: str,
    known: Sequence[Label] | None = None,
) -> Table:
    """Return the measurements of a table's columns.

    A row is one batch of equal requests: ``batch_size`` of ``isl`` new tokens after ``step`` cached ones. Rows that
    repeat a batch of a layer and kernel count once, the first.

    Args:
        columns: values by column name, in the order of the rows.
        framework: the engine that was measured, and its ``version``.
        package_version: of aiconfigurator-core.
        known: what labels mean; None: ``labels()``.
    """
    table = Table()
    known = labels() if known is None else known
    window = columns.get(_WINDOW) or [0] * len(columns["latency"])
    seen: set[tuple[Any, ...]] = set()
    configs: dict[tuple[Any, ...], dict[str, Any] | str] = {}
    meanings: dict[tuple[str, str], tuple[Device | None, Label | None]] = {}
    rows = zip(*(columns[name] for name in _COLUMNS), window, strict=True)
    for gpu, label, count, new, cached, heads, kv_heads, size, dtype, kv_dtype, latency, tokens in rows:
        if (gpu, label) not in meanings:
            device = find_gpu(gpu)
            meanings[gpu, label] = device, None if device is None else meaning_of(known, framework, label, device)
        device, meaning = meanings[gpu, label]
        asked = (heads, kv_heads, size, dtype, kv_dtype, int(tokens) if tokens and tokens > 0 else 0)
        if asked not in configs:
            configs[asked] = _config(*asked)
        config = configs[asked]
        reason = (
            f"{gpu} is no known GPU"
            if device is None
            else f"{framework}'s label {label} has no meaning here"
            if meaning is None
            else f"{label}: {meaning.excluded}"
            if meaning.excluded
            else config
            if isinstance(config, str)
            else "its time is not a positive number"
            if not latency or not latency > 0
            else ""
        )
        if not reason and (label, asked, count, new, cached) in seen:
            reason = "it repeats a batch"
        if reason:
            table.left_out[reason] = table.left_out.get(reason, 0) + 1
            continue
        assert device is not None
        assert meaning is not None
        assert isinstance(config, dict)
        seen.add((label, asked, count, new, cached))
        table.measurements.append(
            Measurement(
                gpu=gpu,
                compute_capability=device.capability_text,
                libraries={framework: version},
                backend=meaning.backend,
                kernel={"decode" if new == 1 else "prefill": meaning.kernel},
                config=config,
                batch=str(BatchShape((RequestGroup(count, new, new + cached),))),
                time_us=float(f"{1000 * latency:.6g}"),
                method="table",
                source=f"{DISTRIBUTION} {package_version} {framework} {version}",
            )
        )
    return table


_COLUMNS = (
    *("device", "kernel_source", "batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim"),
    *("attn_dtype", "kv_cache_dtype", "latency"),
)
_WINDOW = "window_size"
"""A column that older tables lack; 0, or no number: no window."""


def meaning_of(known: Sequence[Label], framework: str, label: str, device: Device) -> Label | None:
    """Return what a label means on a device: the first of ``known`` that fits."""
    for each in known:
        if (each.framework, each.label) == (framework, label) and device.capability_text.startswith(each.capability):
            return each
    return None


def _config(heads: int, kv_heads: int, size: int, dtype: str, kv_dtype: str, window: int) -> dict[str, Any] | str:
    """Return the layer's fields, or why there is no such layer here."""
    if dtype != "bfloat16":
        return f"attn_dtype {dtype}: queries of that type come from a layer here in bfloat16"
    if kv_dtype not in _KV_DTYPES:
        return f"kv_cache_dtype {kv_dtype} is unknown"
    try:
        config = AttentionConfig(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            kv_cache_dtype=_KV_DTYPES[kv_dtype],  # type: ignore[arg-type]
            sliding_window=window or None,
        )
    except ConfigError as error:
        return error.message
    return timed_layer(config).to_dict()


def _parquet() -> Any:
    try:
        return import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise MeasurementError("the tables are parquet files: pyarrow is not installed", hint=INSTALL) from None
