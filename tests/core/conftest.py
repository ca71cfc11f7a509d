"""What the tests of core share: rules files in an empty world, and backends made of plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.spec import BackendPlan, BackendSpec, Capabilities, ComputeCapabilities, Fact, HeadSizes


@pytest.fixture(autouse=True, scope="module")
def empty_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No user file, no variable, and an empty working directory: only the packaged rules are left."""
    world = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(world / "config"))
        patch.delenv("ATTN_SELECT_RULES", raising=False)
        (world / "cwd").mkdir()
        patch.chdir(world / "cwd")
        yield world


@pytest.fixture
def rules_file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a rules file: ``version = 1`` is put in front of what it is given."""

    def write(body: str, name: str = "mine.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"version = 1\n{body}", encoding="utf-8")
        return path

    return write


def make_capabilities(**changes: Any) -> Capabilities:
    """Return the capabilities of a plain decoder backend for bfloat16 and float16 on 8.0 and up."""
    facts: dict[str, Any] = {
        "compute_capabilities": ComputeCapabilities((((8, 0), (9, 9)),)),
        "dtypes": ("bfloat16", "float16"),
        "kv_cache_dtypes": ("bfloat16", "float16"),
        "head_sizes": HeadSizes(multiple_of=8, maximum=256),
        "block_sizes": (16,),
        **changes,
    }
    plain = ("mla", "sparse", "reads_cache")
    return Capabilities(**{name: value if name in plain else Fact(value, "a test") for name, value in facts.items()})


def make_plan(**changes: Any) -> BackendPlan:
    """Return a plan that reads blocks of 16 tokens in one layout."""
    plan: dict[str, Any] = {
        "path": "plain",
        "because": "there is only one",
        "query_dtype": "bfloat16",
        "returns_lse": True,
        "kv_layouts": ("FLASH_ATTN_NHD",),
        "kernel_block_sizes": (16,),
        "cuda_graph": "ALWAYS",
        **changes,
    }
    return BackendPlan(**plan)


def make_spec(name: str = "PLAIN", **changes: Any) -> BackendSpec:
    """Return a spec that serves both phases with ``make_capabilities()``."""
    both = make_capabilities()
    fields: dict[str, Any] = {
        "summary": "a backend of the tests",
        "capabilities": {"prefill": both, "decode": both},
        "plan": lambda config, device, environment, options, phase: make_plan(),
        "load": "nowhere:Nothing",
        **changes,
    }
    return BackendSpec(name=name, **fields)


@pytest.fixture(scope="session")
def capabilities() -> Callable[..., Capabilities]:
    return make_capabilities


@pytest.fixture(scope="session")
def plan() -> Callable[..., BackendPlan]:
    return make_plan


@pytest.fixture(scope="session")
def spec() -> Callable[..., BackendSpec]:
    return make_spec
