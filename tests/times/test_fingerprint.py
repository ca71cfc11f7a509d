"""What a time is of: which changes of a plugin make its times stale, and which do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.spec import BackendSpec, Library
from attn_select.machine.environment import Environment
from attn_select.times import fingerprint as module
from attn_select.times.fingerprint import fingerprint, present, sources_hash, stale_parts

FILES = {
    "__init__.py": '"""A plugin."""\n',
    "plugin.py": "NAME = 1\n",
    "tuning.toml": "tile = 64 # keys\n",
    "tuning.py": 'FILE = "tuning.toml"\n',
    "facts/__init__.py": "",
    "facts/attn.py": "PATH = 'one'\n",
    "runtime/__init__.py": "",
    "runtime/other.py": "OTHER = 1\n",
    "runtime/attn.py": '"""Runs."""\n\nfrom __future__ import annotations\n\nimport no_such_library\n'
    "from acme_times.facts.attn import PATH\nfrom acme_times.runtime import (\n    schedule,\n)\n\nclass Acme: ...\n",
    "runtime/schedule.py": "def splits(keys):\n    # as many\n    from acme_times.kernels.decode import WIDTH\n"
    "    return keys // WIDTH\n\nfrom acme_times import tuning\n",
    "kernels/__init__.py": "",
    "kernels/decode.py": 'WIDTH = 16  # "of a tile"\nASM = """\n# add\n"""\n',
    "kernels/prefill.py": "WIDTH = 32\n",
}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what writes a plugin with changed files, and returns the hash of its runtime. Nothing of it can be run:
    its runtime imports a library that nobody has.
    """
    monkeypatch.syspath_prepend(tmp_path)

    def written(**changed: str) -> str:
        for name, text in {**FILES, **changed}.items():
            path = tmp_path / "acme_times" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        sources_hash.cache_clear()
        module._of_file.cache_clear()
        module._modules.cache_clear()
        return sources_hash("acme_times.runtime.attn")

    return written


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("kernels/decode.py", '"""Decodes."""\n\nWIDTH = 16\n\n\nASM = """\n# add\n"""  # its code\n'),
        ("runtime/schedule.py", FILES["runtime/schedule.py"].replace("    # as many\n", '    """As many."""\n\n')),
        ("tuning.toml", "# measured\ntile = 64\n"),
        ("facts/attn.py", "PATH = 'two'\n"),
        ("plugin.py", "NAME = 2\n"),
        ("runtime/other.py", "OTHER = 2\n"),
        ("kernels/prefill.py", "WIDTH = 64\n"),
    ],
)
def test_what_changes_no_time_keeps_the_hash(plugin: Callable[..., str], file: str, text: str) -> None:
    assert plugin() == plugin(**{file: text})


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("kernels/decode.py", FILES["kernels/decode.py"].replace("16", "32")),
        ("kernels/decode.py", FILES["kernels/decode.py"].replace("# add", "# sub")),
        ("kernels/decode.py", FILES["kernels/decode.py"].replace("WIDTH", "  WIDTH")),
        ("runtime/schedule.py", FILES["runtime/schedule.py"].replace("//", "%")),
        ("runtime/attn.py", FILES["runtime/attn.py"].replace("Acme", "Other")),
        ("tuning.toml", "tile = 128\n"),
        ("tuning.py", 'FILE = "tuning.toml"\nMORE = 1\n'),
    ],
)
def test_other_code_has_another_hash(plugin: Callable[..., str], file: str, text: str) -> None:
    assert plugin() != plugin(**{file: text})


def spec(*groups: tuple[str, ...]) -> BackendSpec:
    """Return a spec that needs one library of each group."""
    libraries = [[Library(name, name, f"pip install {name}") for name in group] for group in groups]
    return BackendSpec(
        name="ACME",
        summary="",
        capabilities={},
        plan=lambda *_: [],
        load="acme_times.runtime.attn:Acme",
        libraries=libraries,
    )


def environment(**pins: str) -> Environment:
    return Environment(assume_installed=True, pins={name.replace("_", "-"): version for name, version in pins.items()})


def test_own_kernels_count_by_their_sources_and_their_compiler(plugin: Callable[..., str]) -> None:
    digest, here = plugin(), environment(torch="2.11.0+cu130", triton="3.6.1")
    assert fingerprint(spec(("torch",), ("triton",)), here) == {"sources": digest, "triton": "3.6"}
    assert fingerprint(spec(("torch",)), here) == {"sources": digest, "torch": "2.11"}
    assert "no_such_library" not in sys.modules


def test_times_are_stale_where_a_known_part_differs(plugin: Callable[..., str]) -> None:
    own: Any = spec(("torch",), ("triton",))
    plugin()
    recorded = fingerprint(own, environment(triton="3.6.0"))
    assert stale_parts("ACME", recorded, present(recorded, own, environment(triton="3.6.9"))) == []
    assert stale_parts("ACME", recorded, present(recorded, own, environment(triton="3.7.1"))) == []  # alike
    assert stale_parts("ACME", recorded, present(recorded, own, environment(triton="3.8.0"))) == ["triton 3.6, now 3.8"]
    plugin(**{"kernels/decode.py": "WIDTH = 8\n"})
    now = present(recorded, own, environment())
    assert set(now) == {"sources"}  # Triton's version is not known, and nothing is said of it
    assert stale_parts("ACME", recorded, now) == ["its own kernels or schedules changed"]


def test_releases_are_alike_for_the_backends_that_were_compared() -> None:
    recorded, now = {"vllm": "0.26.0"}, {"vllm": "0.33.0"}
    assert stale_parts("FLASH_ATTN", recorded, now) == stale_parts("FLASH_ATTN_MLA", recorded, now) == []
    assert stale_parts("FLASHMLA", recorded, now) == ["vllm 0.26.0, now 0.33.0"]
    assert stale_parts("FLASH_ATTN", recorded, {"vllm": "0.32.0"}) == ["vllm 0.26.0, now 0.32.0"]
