"""The choice among several distributions' builds of one kernel, and the reasons where none serves a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_select.backends.kernel_builds import KernelBuild, Objection, Pin, choose, merge, pin_provider
from attn_select.backends.spec import Library, Reason
from attn_select.machine.environment import Environment
from attn_select.testing.toolkit import environment_of

RED = Library("acme-red", "acme_red", "pip install acme-red", ">=2")
BLUE = Library("acme-blue", "acme_blue", "pip install acme-blue")
OLD = Library("acme-old", "acme_old", "pip install acme-red")  # published nowhere: red has the same kernel
RED_BUILD = KernelBuild(kernel="Acme2", library=RED, module="acme_red.attention")
BLUE_BUILD = KernelBuild(kernel="Acme2", library=BLUE, module="acme_blue")
OLD_BUILD = KernelBuild(kernel="Acme1", library=OLD, module="acme_old")
BUILDS = (RED_BUILD, BLUE_BUILD, OLD_BUILD)
SINKS = Objection("sinks", "none", "attention sinks", True)
FP8 = Objection("kv-cache-dtype", "16-bit KV only", "KV-cache dtype fp8_e4m3", "fp8_e4m3", "--kv-cache-dtype auto")

Against = dict[KernelBuild, Sequence[Objection]]


def here(*there: Library, old: Sequence[Library] = ()) -> Environment:
    """Return an environment in which only these libraries are installed, some of them in an old version."""
    versions = {**{library.distribution: "2.0" for library in there}, **{each.distribution: "1.0" for each in old}}
    return environment_of(installed=versions)


def chosen(environment: Environment, against: Against, pins: Sequence[Pin[Any]] = ()) -> KernelBuild | list[Reason]:
    return choose(BUILDS, environment, lambda build: against.get(build, ()), pins=pins, capability=(9, 0))


def reasons(environment: Environment, against: Against, pins: Sequence[Pin[Any]] = ()) -> dict[str, Reason]:
    found = chosen(environment, against, pins)
    assert isinstance(found, list)
    assert found
    return {reason.code: reason for reason in found}


def pin_kernel(kernel: str) -> Pin[Any]:
    return Pin("backends.ACME.kernel", kernel, lambda build: build.kernel == kernel)


def test_the_first_installed_build_that_serves_is_chosen() -> None:
    assert chosen(Environment(assume_installed=True), {}) is RED_BUILD
    assert chosen(here(BLUE, OLD), {}) is BLUE_BUILD
    assert chosen(here(RED, BLUE), {RED_BUILD: [SINKS]}) is BLUE_BUILD
    assert chosen(here(BLUE, old=[RED]), {}) is BLUE_BUILD


def test_objections_become_one_reason_per_code_that_says_what_each_build_accepts() -> None:
    few = SINKS._replace(accepts="at most 64")
    found = reasons(here(RED, BLUE, OLD), {RED_BUILD: [few], BLUE_BUILD: [few], OLD_BUILD: [SINKS]})
    assert found == {
        "sinks": Reason(
            "sinks", "attention sinks (Acme2: at most 64; Acme1 of acme-old: none)", True, ["at most 64", "none"]
        )
    }


def test_block_sizes_are_merged_to_the_next_size_that_one_build_takes() -> None:
    def wants(multiple: int) -> Objection:
        return Objection("block-size", multiple, "block size 24", 24)

    (reason,) = merge([(RED_BUILD, [wants(256)]), (OLD_BUILD, [wants(16)])])
    assert reason.message == ("block size 24 (Acme2 of acme-red: multiples of 256; Acme1 of acme-old: multiples of 16)")
    assert (reason.observed, reason.supported, reason.remedy) == (24, "multiples of 16 or 256", "--block-size 32")


def test_another_build_that_serves_is_recommended() -> None:
    against = {RED_BUILD: [FP8], BLUE_BUILD: [SINKS]}
    assert reasons(here(BLUE), {BLUE_BUILD: [SINKS], RED_BUILD: [SINKS]})["sinks"].remedy == "pip install acme-red"
    assert reasons(here(BLUE), {BLUE_BUILD: [SINKS]})["sinks"].remedy == "pip install acme-red"
    # A remedy that holds for every build is simpler than another package.
    assert reasons(here(RED), against)["kv-cache-dtype"].remedy == "--kv-cache-dtype auto"
    assert reasons(here(BLUE, old=[RED]), {BLUE_BUILD: [SINKS]})["sinks"].remedy == "pip install --upgrade acme-red"


def test_nothing_installed() -> None:
    found = reasons(here(), {RED_BUILD: [SINKS], BLUE_BUILD: [SINKS], OLD_BUILD: [SINKS]})
    assert list(found) == ["library-missing", "sinks"]
    missing = found["library-missing"]
    assert missing.message == (
        "no usable package has Acme2 or Acme1 for compute capability 9.0: "
        "acme-red is not installed; acme-blue is not installed; acme-old is not installed"
    )
    assert missing.observed == dict.fromkeys(("acme-red", "acme-blue", "acme-old"), "missing")
    assert missing.supported == ["acme-red>=2", "acme-blue", "acme-old"]
    assert missing.remedy is None, "no build serves the layer, so none is worth installing"
    assert reasons(here(), {RED_BUILD: [SINKS]})["library-missing"].remedy == "pip install acme-blue"


def test_a_version_that_is_too_old_is_a_reason_of_its_own() -> None:
    reason = reasons(here(old=[RED]), {})["library-version"]
    assert "acme-red 1.0 (needs >=2)" in reason.message
    assert reason.remedy == "pip install --upgrade acme-red"


def test_a_pin_is_loosened_before_the_layer_is_changed_where_that_helps() -> None:
    blue = pin_provider("ACME", "acme-blue")
    against = {BLUE_BUILD: [FP8]}
    assert reasons(here(RED, BLUE), against, blue)["kv-cache-dtype"].remedy == 'backends.ACME.provider = "auto"'
    assert reasons(here(BLUE), against, blue)["kv-cache-dtype"].remedy == "--kv-cache-dtype auto"
    assert reasons(here(BLUE), {BLUE_BUILD: [SINKS]}, blue)["sinks"].remedy == 'backends.ACME.provider = "auto"'


def test_pins_that_allow_no_build_say_what_there_is() -> None:
    pins = (pin_kernel("Acme1"), *pin_provider("ACME", "acme-blue"))
    reason = reasons(here(RED, OLD), {}, pins)["pinned-kernel"]
    assert reason.observed == 'backends.ACME.kernel = "Acme1", backends.ACME.provider = "acme-blue"'
    assert reason.supported == ["Acme2 of acme-red", "Acme2 of acme-blue", "Acme1 of acme-old"]
    assert "no such kernel for compute capability 9.0" in reason.message
