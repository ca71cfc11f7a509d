"""Files that are replaced in one step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from attn_select.machine.files import replace_file

pytestmark = pytest.mark.skipif(os.name == "nt", reason="files have no such modes there")


@pytest.fixture(params=[0o022, 0o077, 0o000], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The process's umask."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("mode", [0o664, 0o666, 0o600, 0o640, 0o777], ids=oct)
def test_a_file_keeps_its_mode(tmp_path: Path, umask: int, mode: int) -> None:
    target = tmp_path / "rules.toml"
    target.write_text("old")
    target.chmod(mode)
    replace_file(target, b"new")
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [target]


def test_a_new_file_has_the_mode_that_the_process_gives(tmp_path: Path, umask: int) -> None:
    replace_file(tmp_path / "rules.toml", b"new")
    assert (tmp_path / "rules.toml").stat().st_mode & 0o777 == 0o666 & ~umask
