"""Plugins: loaded one by one from entry points; a broken one is reported and takes nobody down."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attn_select.backends.registry import Plugin, Registry, build_registry, load_plugins
from attn_select.backends.spec import (
    BackendOptions,
    BackendSpec,
    Capabilities,
    ComputeCapabilities,
    Fact,
    HeadSizes,
    Library,
)
from attn_select.backends.spec_check import problems_of
from attn_select.errors import RuntimeMissingError

MakeSpec = Callable[..., BackendSpec]

GOOD = """
from attn_select import hookimpl
from attn_select.backends.spec import BackendPlan, BackendSpec, Capabilities, ComputeCapabilities, Fact, HeadSizes

def make(name):
    facts = Capabilities(
        compute_capabilities=Fact(ComputeCapabilities(cpu=True), "a test"),
        dtypes=Fact(("float32",), "a test"),
        kv_cache_dtypes=Fact(("float32",), "a test"),
        head_sizes=Fact(HeadSizes(), "a test"),
        block_sizes=Fact((16,), "a test"),
    )
    return BackendSpec(
        name=name, summary="", capabilities={"prefill": facts}, plan=lambda *_: [], load="nowhere:Nothing"
    )

NAMES = ["PLAIN"]

@hookimpl
def attn_select_register_backends():
    return [make(name) for name in NAMES]
"""


class Site:
    """A folder on ``sys.path`` with modules and the metadata of distributions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def module(self, name: str, code: str = GOOD, *backends: str) -> None:
        names = f"\nNAMES = {list(backends)}\n" if backends else ""
        (self.path / f"{name}.py").write_text(code + names)

    def distribution(self, name: str, entry_points: str, metadata: str | None = None) -> Path:
        folder = self.path / f"{name}-1.0.dist-info"
        folder.mkdir()
        if metadata is None:
            metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n\nName: not this one\n"
        if metadata:
            (folder / "METADATA").write_text(metadata)
        (folder / "entry_points.txt").write_text(f"[attn_select]\n{entry_points}\n")
        return folder

    def plugin(self, name: str, code: str = GOOD, *backends: str) -> None:
        """A distribution ``name`` with one entry point ``name`` for a module of its own."""
        self.module(f"the_{name}", code, *backends)
        self.distribution(name, f"{name} = the_{name}")

    def build(self) -> Registry:
        entry_points = [
            entry_point
            for distribution in importlib.metadata.distributions(path=[str(self.path)])
            for entry_point in distribution.entry_points
        ]
        return build_registry(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


def test_a_good_plugin(site: Site) -> None:
    site.plugin("one", GOOD, "ALPHA", "BETA")
    found = site.build()
    assert list(found.specs) == ["ALPHA", "BETA"]
    assert found.owners == {"ALPHA": "one", "BETA": "one"}
    assert found.plugins == [Plugin("one", "one", "1.0", ("ALPHA", "BETA"))]
    assert (found.conflicts, found.warnings) == ({}, [])


HOOK = "from attn_select import hookimpl\n@hookimpl\ndef attn_select_register_backends():\n    return "
BROKEN = {
    "import": ("import no_such_kernel_library", "ModuleNotFoundError: No module named 'no_such_kernel_library'"),
    "error": ("raise RuntimeError('a\\n b')", "RuntimeError: a  b"),
    "str": ("class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd", "Odd: <Odd that cannot be shown>"),
    "no_hook": ("x = 1", "the_no_hook has no @hookimpl attn_select_register_backends"),
    "unknown_hook": (GOOD + "@hookimpl\ndef attn_select_register_backend(): return []", "attn_select_register_backend"),
    "none": (HOOK + "None", "has no @hookimpl"),
    "text": (HOOK + "'PLAIN'", "returned 'PLAIN' instead of a list"),
    "rubbish": (HOOK + "[3]", "registered 3 (accepted: BackendSpec)"),
    "raises": (HOOK + "1 / 0", "ZeroDivisionError: division by zero"),
    "name": (GOOD + "NAMES = ['plain']", "backend 'plain': name (accepted: A-Z, 0-9 and _, starting with a letter)"),
    "twice": (GOOD + "NAMES = ['PLAIN', 'PLAIN']", "backend PLAIN is registered twice by the same plugin"),
    "deep": ("def f(): f()\nf()", "RecursionError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_takes_nobody_down(site: Site, kind: str) -> None:
    code, expected = BROKEN[kind]
    site.plugin("before", GOOD, "BEFORE")
    site.plugin(kind, code)
    site.plugin("zz_after", GOOD, "AFTER")
    found = site.build()
    assert list(found.specs) == ["BEFORE", "AFTER"]
    (failed,) = [plugin for plugin in found.plugins if plugin.error]
    assert (failed.name, failed.backends) == (kind, ())
    assert failed.error is not None
    assert expected in failed.error
    assert failed.error.isprintable()
    assert len(failed.error) < 500
    (warning,) = found.warnings
    assert warning.startswith(f"plugin {kind} (")
    assert warning.endswith(f"is not usable: {failed.error}")


@pytest.mark.parametrize("value", ["no_such_module_at_all", "the_one:missing", "the_one:NAMES", "not a module"])
def test_an_entry_point_that_leads_nowhere(site: Site, value: str) -> None:
    site.module("the_one")
    site.distribution("one", f"one = {value}")
    site.plugin("two", GOOD, "TWO")
    found = site.build()
    assert list(found.specs) == ["TWO"]
    assert found.plugins[0].error


def test_a_backend_of_two_plugins_is_nobodys(site: Site) -> None:
    site.plugin("one", GOOD, "SHARED", "ONE")
    site.plugin("two", GOOD, "TWO", "SHARED")
    found = site.build()
    assert list(found.specs) == ["ONE", "TWO"]
    assert found.owners == {"ONE": "one", "TWO": "two"}
    assert found.conflicts == {"SHARED": ("one", "two")}
    assert found.warnings == ["backend SHARED is registered by one and by two: usable once one owner is left"]
    site.plugin("three", GOOD, "SHARED")
    assert site.build().conflicts == {"SHARED": ("one", "three", "two")}


def test_a_known_name_belongs_to_the_distribution_that_the_packaged_rules_list(site: Site) -> None:
    site.plugin("aa_stranger", GOOD, "TRITON_ATTN", "OWN")
    site.plugin("zz_other", GOOD, "TRITON_ATTN")
    assert site.build().conflicts == {"TRITON_ATTN": ("aa-stranger", "zz-other")}
    site.module("the_triton", GOOD, "TRITON_ATTN")
    site.distribution("attn_select_triton", "triton = the_triton")
    found = site.build()
    assert found.owners == {"OWN": "aa-stranger", "TRITON_ATTN": "attn-select-triton"}
    assert found.conflicts == {}
    assert found.ignored == {"TRITON_ATTN": ("aa-stranger", "zz-other")}
    assert found.warnings == [
        "backend TRITON_ATTN of aa-stranger and of zz-other is ignored: the name belongs to attn-select-triton, which "
        "is installed"
    ]


def test_what_a_plugin_prints_goes_to_stderr(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    code = GOOD.replace("    return [make", "    print('called')\n    return [make")
    site.plugin("loud", f"print('imported')\n{code}")
    site.plugin("broken", "print('before the error')\nraise RuntimeError")
    assert list(site.build().specs) == ["PLAIN"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == ["before the error", "imported", "called"]


@pytest.mark.parametrize("content", [b"[attn_select]\nno equals sign\n", b"[attn_select]\nx = \xff\n"])
def test_a_stranger_with_malformed_entry_points(site: Site, content: bytes) -> None:
    """importlib.metadata fails as a whole when one file is malformed; the plugins are found all the same."""
    site.plugin("good", GOOD, "OF_A_TEST")
    (site.distribution("stranger", "") / "entry_points.txt").write_bytes(content)
    load_plugins.cache_clear()
    try:
        found = load_plugins()
        assert found.owners["OF_A_TEST"] == "good"
        (failed,) = [plugin for plugin in found.plugins if plugin.distribution == "stranger"]
        assert (failed.name, failed.version) == ("?", "1.0")
        assert "entry_points.txt cannot be read" in str(failed.error)
    finally:
        load_plugins.cache_clear()


# --- What a spec may look like ---


class NeedsValue(BackendOptions):
    splits: int


LIBRARY = Library("flash-attn", "flash_attn", "pip install flash-attn", ">=2.6,!=2.7.0")
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"name": "lower"}, "name"),
    ({"name": None}, "name"),
    ({"summary": None}, "summary = None"),
    ({"rank": ("behind", "OTHER")}, "rank = ('behind', 'OTHER')"),
    ({"capabilities": {}}, "capabilities = {}"),
    ({"capabilities": {"prefill": None}}, "capabilities['prefill'] = None"),
    ({"plan": None}, "plan = None"),
    ({"load": "module"}, "load = 'module'"),
    ({"compile_key": 3}, "compile_key = 3"),
    ({"variables": ("",)}, "variables = ('',)"),
    ({"options": dict}, "options = <class 'dict'>"),
    ({"options": NeedsValue}, "options without a default: splits"),
    ({"libraries": LIBRARY}, "libraries = Library("),
    ({"libraries": [["flash-attn"]]}, "libraries has 'flash-attn'"),
    ({"libraries": [[Library("a", "a.b", "pip install a")]]}, "module 'a.b' of a (accepted: a top-level import name)"),
    ({"libraries": [[Library("a", "a", "pip install a", "2.6")]]}, "version '2.6' of a (accepted: a PEP 440 range)"),
]


@pytest.mark.parametrize(("changes", "expected"), WRONG)
def test_what_is_wrong_with_a_spec(spec: MakeSpec, changes: dict[str, Any], expected: str) -> None:
    (problem,) = problems_of(spec(**changes))
    assert problem.startswith("backend ")
    assert expected in problem
    assert "accepted: " in problem


FACTS: list[tuple[dict[str, Any], str]] = [
    ({"mla": 1}, "mla = 1 (accepted: a bool)"),
    ({"reads_cache": None}, "reads_cache = None"),
    ({"compute_capabilities": ComputeCapabilities(((8, 0), (9, 9)))}, "compute_capabilities = "),  # type: ignore[arg-type]
    ({"head_sizes": (64, 128)}, "head_sizes = (64, 128) (accepted: HeadSizes)"),
    ({"dtypes": ()}, "dtypes = ()"),
    ({"dtypes": ("bf16",)}, "dtypes = ('bf16',) (accepted: a tuple of bfloat16, float16, float32)"),
    ({"kv_cache_dtypes": ("fp8",)}, "kv_cache_dtypes = ('fp8',) (accepted: a tuple of auto, "),
    ({"block_sizes": ()}, "block_sizes = () (accepted: at least one"),
    ({"block_sizes": (0,)}, "block_sizes = (0,) (accepted: a tuple of integers from 1)"),
    ({"attn_types": ("causal",)}, "attn_types = ('causal',) (accepted: a tuple of decoder, "),
    ({"speculative_tokens": -1}, "speculative_tokens = -1 (accepted: an integer from 0)"),
    ({"sinks": "yes"}, "sinks = 'yes' (accepted: a bool)"),
]


@pytest.mark.parametrize(("changes", "expected"), FACTS)
def test_what_is_wrong_with_a_fact(
    spec: MakeSpec, capabilities: Callable[..., Capabilities], changes: dict[str, Any], expected: str
) -> None:
    (problem,) = problems_of(spec(capabilities={"decode": capabilities(**changes)}))
    assert problem.startswith("backend 'PLAIN': capabilities['decode'].")
    assert expected in problem


def test_facts_have_a_source(spec: MakeSpec) -> None:
    facts: Any = {
        "compute_capabilities": ComputeCapabilities(),
        "dtypes": Fact(("float32",), None),  # type: ignore[arg-type]
        "kv_cache_dtypes": Fact((), "a test"),
        "head_sizes": Fact(HeadSizes(), "a test"),
        "block_sizes": Fact((1,), "a test"),
    }
    found = problems_of(spec(capabilities={"decode": Capabilities(**facts)}))
    assert [problem.split("].")[1].split(" ")[0] for problem in found] == ["compute_capabilities", "dtypes"]
    assert all("a Fact with its source" in problem for problem in found)


# --- Rules that plugins ship ---

SHIPS = GOOD + (
    "import pathlib\n\n@hookimpl\ndef attn_select_register_rules():\n"
    "    return pathlib.Path(__file__).with_name(__name__ + '.toml')\n"
)
PREFER = '[[rules]]\nname = "rank"\nprefer = ["{}"]\nbecause = "we measured it"\n'


@pytest.mark.parametrize("name", load_plugins().specs)
def test_every_backend_names_a_runtime_that_is_there(name: str) -> None:
    pytest.importorskip("torch")
    from attn_select.runtime.backend import AttentionBackend
    from attn_select.runtime.states import StateBackend

    spec = load_plugins().specs[name]
    module, _, attribute = spec.load.partition(":")
    base = StateBackend if any(each.sort == "state" for each in spec.capabilities.values()) else AttentionBackend
    assert issubclass(getattr(importlib.import_module(module), attribute), base)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("nowhere:Backend", "backend PLAIN: load = 'nowhere:Backend': no module nowhere"),
        ("json.nowhere:Backend", "backend PLAIN: load = 'json.nowhere:Backend': no module json.nowhere"),
        ("json.decoder:Backend", "backend PLAIN: load = 'json.decoder:Backend': module json.decoder has no Backend"),
    ],
)
def test_a_runtime_that_is_not_there_is_named(spec: MakeSpec, load: str, said: str) -> None:
    with pytest.raises(RuntimeMissingError) as caught:
        replace(spec(), load=load).get_class()
    assert caught.value.message == said
