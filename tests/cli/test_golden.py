"""``attn-select diff --golden`` with files of another shape: never an internal error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_select.errors import ConfigError
from attn_select_cli.diff import MAX_BYTES, changes_since

MODEL = ("--model", "deepseek-v3", "--gpu", "h100")


def document(run: Any) -> dict[str, Any]:
    return run("explain", *MODEL, "--json").json


def diff(run: Any, folder: Path, golden: Any) -> Any:
    file = folder / "golden.json"
    file.write_text(json.dumps(golden))
    return run("diff", *MODEL, "--golden", str(file))


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (("schema_version",), 2, "expected schema_version 1 and a layer"),
        (("layers",), [], "expected schema_version 1 and a layer"),
        (("layers", 0), {}, "'kind' is missing"),
        (("layers", 0), None, "not what `explain --json` writes: a value has another type"),
    ],
)
def test_a_file_of_another_shape_is_refused(
    run: Any, tmp_path: Path, place: tuple[Any, ...], value: Any, text: str
) -> None:
    golden = document(run)
    *parents, last = place
    part: Any = golden
    for key in parents:
        part = part[key]
    part[last] = value
    result = diff(run, tmp_path, golden)
    assert (result.code, result.out) == (2, "")
    assert text in result.err
    assert "golden.json" in result.err


def test_a_file_from_before_states_is_read(run: Any, tmp_path: Path) -> None:
    golden = document(run)
    for layer in golden["layers"]:
        del layer["plan"]["bytes_per_request"]
    assert diff(run, tmp_path, golden).code == 0


def test_a_file_that_is_no_json_says_so(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "golden.json"
    wrong = (
        (b"[]", "expected an object, found []"),
        (b"{}", "'schema_version' is missing"),
        (b"{", "Expecting property name"),
        (b"\xff", "can't decode"),
        (b"[" * 100_000, "nested too deeply"),
    )
    for content, said in wrong:
        file.write_bytes(content)
        result = run("diff", *MODEL, "--golden", str(file))
        assert result.code == 2
        assert said in result.err
        assert "Error" not in result.err  # no name of a Python exception
    assert "No such file" in run("diff", *MODEL, "--golden", str(tmp_path / "nowhere.json")).err
    assert "is not a regular file" in run("diff", *MODEL, "--golden", "/dev/zero").err
    with pytest.raises(ConfigError, match="json': embedded null byte"):
        changes_since("golden\0.json", {})
    os.truncate(file, MAX_BYTES + 1)
    assert f"is larger than {MAX_BYTES} bytes" in run("diff", *MODEL, "--golden", str(file)).err


def places(part: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON document."""
    keys = part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
    return [path for key in keys for path in ((*here, key), *places(part[key], (*here, key)))]


def test_no_mutated_file_is_an_internal_error(run: Any, tmp_path: Path) -> None:
    original = json.dumps(document(run))
    value = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from([[], {}, [{}], [[]]])

    @given(st.data())
    def check(data: st.DataObject) -> None:
        golden = json.loads(original)
        for _ in range(data.draw(st.integers(1, 2))):
            *parents, last = data.draw(st.sampled_from(places(golden)))
            part: Any = golden
            for key in parents:
                part = part[key]
            if data.draw(st.booleans()):
                del part[last]
            else:
                part[last] = data.draw(value)
        result = diff(run, tmp_path, golden)
        assert result.code in (0, 1, 2), result.err
        assert result.code != 2 or "golden.json" in result.err

    check()
