"""The emulated entries take what FlashInfer's do in each release, by what ``make_signatures`` read from its wheels."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_emulated as fi
import flashinfer_groups as groups
import make_signatures
from flashinfer_emulated import states

from attn_select.backends.kernel_builds import KernelBuild
from attn_select.errors import KernelMismatchError
from attn_select.runtime.installed_builds import InstalledBuild
from attn_select_flashinfer.facts.libraries import FLASHINFER_PYTHON
from attn_select_flashinfer.plugin import attn_select_register_backends
from attn_select_flashinfer.runtime import library, plans

MLA = "BatchMLAPagedAttentionWrapper"
EMULATED = {release: fi.entries(release) for release in fi.RELEASES}
READ = fi.READ
ENTRIES = [(release, entry) for release in fi.RELEASES for entry in READ[release]["signatures"]]
Signature = list[tuple[str, str | None]]


def emulated_signature(function: Any) -> Signature:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.KEYWORD_ONLY: "**"}
    return [
        (
            stars.get(parameter.kind, "") + parameter.name,
            None if parameter.default is parameter.empty else repr(parameter.default),
        )
        for parameter in inspect.signature(function).parameters.values()
    ]


def emulated(release: str, entry: str) -> Any:
    """Return the emulated function or, unbound, method of ``module.entry`` or ``module.entry.method``."""
    _, name, *method = entry.split(".")
    found = EMULATED[release][name]
    if not method:
        return found
    made = getattr(found, method[0], None)
    return getattr(made, "__func__", made)


@pytest.mark.parametrize(("release", "entry"), ENTRIES, ids=["-".join(each) for each in ENTRIES])
def test_the_emulated_signature_is_the_wheels(release: str, entry: str) -> None:
    function = emulated(release, entry)
    if function is None:
        pytest.skip("not emulated")
    if release == fi.RELEASES[0] and function.__module__ == states.__name__:
        pytest.skip("emulated as the newest release has it")
    wanted = emulated_signature(function)
    signature = READ[release]["signatures"][entry]
    found = [(name, None if default is None else repr(eval(default, vars(fi)))) for name, default in signature]
    names = {name.lstrip("*"): default for name, default in found}
    assert {name.lstrip("*"): default for name, default in wanted}.items() <= names.items()
    by_place = [name for name, _ in wanted if not name.startswith("*")]
    order = [name.lstrip("*") for name, _ in found if not name.startswith("**") or name.lstrip("*") in by_place]
    assert [name for name in order if name in by_place] == by_place
    needed = {name.lstrip("*") for name, default in found if default is None and (name[0] != "*" or name[:2] == "**")}
    added = needed - {name.lstrip("*") for name, _ in wanted}
    assert not added, f"{entry} wants {added} now"


@pytest.mark.parametrize("release", fi.RELEASES)
def test_what_is_passed_is_taken_in_every_release(release: str) -> None:
    parameters = library.PARAMETERS if release == fi.RELEASES[0] else {**library.PARAMETERS, **library.WITH_METADATA}
    taken = READ[release]["signatures"]
    places = {entry.split(".", 1)[1]: [name.lstrip("*") for name, _ in found] for entry, found in taken.items()}
    for name, methods in parameters.items():
        for method, passed in methods.items():
            lacks = set(passed.split()) - set(places[f"{name}.{method}".rstrip(".")])
            assert not lacks, f"{name}.{method} of {release} takes no {lacks}"
    assert (library.METADATA in {entry.split(".")[1] for entry in taken}) == (release != fi.RELEASES[0])


def test_the_wrappers_keep_their_schedules_where_the_runtime_replaces_them() -> None:
    """The ring swaps the pinned schedule before a plan, and the MLA wrappers of decode share one on the device."""
    pinned, device = plans.PINNED, "_int_workspace_buffer"
    for release in fi.RELEASES:
        named = READ[release]["attributes"]
        for wrapper in ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"):
            assert {pinned, device} <= set(named[wrapper]["plan"])
        assert {pinned, device} <= set(named["BatchPrefillWithRaggedKVCacheWrapper"]["plan"])
    before, since = (READ[release]["attributes"] for release in fi.RELEASES)
    assert {pinned, device} <= set(before[MLA]["__init__"]) & set(before[MLA]["plan"])
    assert (device in before[MLA]["run"], pinned in before[MLA]["run"]) == (True, False)
    # Since 0.7 each plan has its own, which the wrapper shows: the keeper holds it until its copy has finished.
    assert pinned not in since[MLA]["plan"]
    assert {pinned, device} <= set(since["mirrored"])


def test_the_mla_wrapper_runs_the_plan_that_stands_in_it() -> None:
    """A balanced schedule and the sparse one take the place of a plan in what ``run`` reads it from."""
    read = {"_plan_info", "_int_workspace_buffer", "_kv_indices_buf", "_sm_scale"}
    before, since = (READ[release]["attributes"] for release in fi.RELEASES)
    assert read <= set(before[MLA]["run"])
    assert read <= set(since[make_signatures.MECHANICS]["run"])
    assert "_planned_backend" in since[MLA]["run"]
    assert "_planned_backend" not in before[MLA]["plan"]


def test_an_entry_that_takes_other_arguments_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = ModuleType("flashinfer")
    changed.BatchDecodeWithPagedKVCacheWrapper = type(  # type: ignore[attr-defined]
        "Changed", (), {"plan": lambda self, indptr, page_size: None}
    )
    monkeypatch.setattr(InstalledBuild, "imported", lambda self, module: changed)
    decode = "BatchDecodeWithPagedKVCacheWrapper"
    installed = library._Installed(KernelBuild(kernel="FlashInfer", library=FLASHINFER_PYTHON, module="flashinfer"))
    message = r"flashinfer\.BatchDecodeWithPagedKVCacheWrapper\.\w+ has another signature: it takes no argument "
    with pytest.raises(KernelMismatchError, match=message) as info:
        library._entry(installed, decode, library.PARAMETERS[decode])
    assert info.value.hint == "pip install --upgrade flashinfer-python"
    with pytest.raises(KernelMismatchError, match=r"flashinfer\.merge_state_in_place does not exist"):
        library._entry(installed, "merge_state_in_place", {})


def break_one(broken: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a release in the place of the installed one whose entry ``broken`` takes other arguments."""
    places: dict[str, ModuleType] = {}

    def changed(q: Any) -> None: ...

    def imported(self: InstalledBuild, module: str) -> ModuleType:
        if module not in places:
            places[module] = ModuleType(module)
            for name, entry in fi.entries(release).items():
                setattr(places[module], name, changed if name == broken else entry)
            places[module].attention_sink_decl = fi.SINK_DECLARATIONS  # type: ignore[attr-defined]
        return places[module]

    monkeypatch.setattr(InstalledBuild, "imported", imported)
    library.flashinfer.cache_clear()


@pytest.fixture(autouse=True)
def _as_installed() -> Iterator[None]:
    yield
    library.flashinfer.cache_clear()


@pytest.mark.parametrize("release", fi.RELEASES)
@pytest.mark.parametrize(
    "broken", [name for name, methods in library.PARAMETERS.items() if methods and name != "FP4Tensor"]
)
def test_one_changed_entry_refuses_itself_alone(broken: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_one(broken, release, monkeypatch)
    for spec in attn_select_register_backends():
        spec.get_class()
    entries = library.flashinfer()
    entries.check(*(name for name in library.PARAMETERS if name != broken))
    with pytest.raises(KernelMismatchError, match=rf"\.{broken}\b"):
        entries.check(broken)


@pytest.mark.parametrize(
    ("broken", "options"),
    [
        ("BatchPrefillWithPagedKVCacheWrapper", {"use_trtllm": False}),
        ("BatchDecodeWithPagedKVCacheWrapper", {"use_trtllm": False}),
        ("merge_state_in_place", {"use_trtllm": False}),
        ("trtllm_batch_decode_with_kv_cache", {"use_trtllm": "auto"}),
    ],
)
def test_a_group_is_refused_when_it_is_made(
    broken: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_one(broken, fi.RELEASES[0], monkeypatch)
    fields = {"kv_cache_dtype": "fp8_e4m3", "block_size": 16}
    with pytest.raises(KernelMismatchError, match=rf"\.{broken}\b"):
        groups.made("h100", options=options, **fields)
    if broken == "trtllm_batch_decode_with_kv_cache":
        groups.made("h100", options={"use_trtllm": False}, **fields)
