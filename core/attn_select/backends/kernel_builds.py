"""Kernels that come from several distributions: which build serves a layer, or why none does. No torch.

FlashAttention 3, for example, comes with vLLM, with SGLang's wheels and from upstream. Each build takes other layers.
``docs/plugins.md`` says what a plugin for such a kernel writes; ``attn_select.runtime.installed_builds`` imports the
chosen build and compares its version and signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar

from attn_select.backends.reasons import block_size_reason, install_command, library_reason
from attn_select.backends.spec import Library, Reason
from attn_select.machine.environment import Environment

PROVIDER_OPTION: Final = "the distribution to take the kernel from; auto is the first that serves the layer"
"""Description of the option ``provider``, for a plugin's ``BackendOptions``."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KernelBuild:
    """One distribution's build of one kernel. Subclass it and add what the builds of that kernel differ in.

    Attributes:
        kernel: the kernel's name for messages, e.g. ``FA3``. A distribution may build several.
        library: the distribution.
        module: the module that its functions are imported from.
    """

    kernel: str
    library: Library
    module: str

    @property
    def distribution(self) -> str:
        """The distribution's name, which is what the option ``provider`` takes."""
        return self.library.distribution

    @property
    def provider(self) -> str:
        """``vllm (vllm.vllm_flash_attn)``, for ``BackendPlan.provider``."""
        return f"{self.distribution} ({self.module})"

    @property
    def label(self) -> str:
        """``FA3 of vllm``, for messages."""
        return f"{self.kernel} of {self.distribution}"


B = TypeVar("B", bound=KernelBuild)


class Objection(NamedTuple):
    """One reason against one build for one layer.

    Attributes:
        code: code of the reason that it becomes when no build serves the layer.
        accepts: what this build accepts instead, in a few words; for ``block-size`` an int, the tokens of which a block
            must hold a multiple.
        what: what is asked for, in words: ``head size 100``. Equal for all builds.
        observed: the same as data. Equal for all builds.
        remedy: a flag or option that removes the objection in every build; None: there is none.
    """

    code: str
    accepts: Any
    what: str
    observed: Any
    remedy: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Pin(Generic[B]):
    """An option by which the user narrows the builds.

    Attributes:
        option: its full key, e.g. ``backends.FLASH_ATTN.version``; its value ``auto`` allows every build.
        value: what the user set.
        keeps: whether it allows a build.
    """

    option: str
    value: object
    keeps: Callable[[B], bool]

    def __str__(self) -> str:
        return f'{self.option} = "{self.value}"' if isinstance(self.value, str) else f"{self.option} = {self.value}"

    @property
    def loosened(self) -> str:
        """The setting that allows every build."""
        return f'{self.option} = "auto"'


def pin_provider(backend: str, provider: str) -> tuple[Pin[Any], ...]:
    """Return what the value of ``[backends.BACKEND] provider`` pins: nothing for ``auto``."""
    if provider == "auto":
        return ()
    return (Pin(f"backends.{backend}.provider", provider, lambda build: build.distribution == provider),)


def describe_pins(pins: Sequence[Pin[Any]]) -> str:
    """Return ``backends.NAME.provider = "vllm"``, all pins one behind the other; empty without pins."""
    return ", ".join(map(str, pins)) if pins else ""


def device_text(capability: tuple[int, int] | None) -> str:
    """Return a device of this compute capability (None: a CPU) in words, for messages."""
    return "a CPU" if capability is None else "compute capability {}.{}".format(*capability)


def choose(
    builds: Sequence[B],
    environment: Environment,
    objections: Callable[[B], Sequence[Objection]],
    *,
    pins: Sequence[Pin[B]] = (),
    capability: tuple[int, int] | None,
) -> B | list[Reason]:
    """Return the first build that is installed, is allowed by the pins and serves the layer; or why there is none.

    The reasons (at least one) are

    - ``library-missing`` or ``library-version``, where no build that the pins allow is installed;
    - ``pinned-kernel``, where the pins allow no build at all;
    - where all builds in question have objections, what ``merge`` makes of them.

    Their remedy is what brings a build that serves the layer: another value of a pin's option, or an install command.

    Args:
        builds: the ones that the device can run, preferred first; at least one.
        environment: says what is installed.
        objections: returns the objections against a build for the layer; nothing: the build serves it.
        pins: what the user's options fix.
        capability: the device's compute capability, None for a CPU; for messages.
    """
    allowed = [build for build in builds if all(pin.keeps(build) for pin in pins)] if pins else builds
    judged: list[tuple[B, Sequence[Objection]]] = []
    for build in allowed:
        if environment.has(build.library):
            found = objections(build)
            if not found:
                return build
            judged.append((build, found))
    others: list[B] = []
    if len(judged) < len(builds):
        others = [build for build in builds if not any(build is one for one, _ in judged) and not objections(build)]
    reasons: list[Reason] = []
    if not judged:
        if allowed:
            reasons.append(_not_installed(allowed, environment, pins, device_text(capability)))
        else:
            reasons.append(_no_such_build(builds, pins, device_text(capability)))
        # The layer may have obstacles of its own in every build: they are named too.
        judged = [(build, objections(build)) for build in allowed]
    if all(found for _, found in judged):
        reasons += merge(judged)
    if pins:
        # The pin is the first thing to change, unless it names a build that only has to be installed.
        first, last = _under_pins(others, environment, pins), _loosened(others, pins)
        return [replace(reason, remedy=first or reason.remedy or last) for reason in reasons]
    install = install_command(others[0].library, environment) if others else None
    return [replace(reason, remedy=reason.remedy or install) for reason in reasons]


def merge(judged: Sequence[tuple[KernelBuild, Sequence[Objection]]]) -> list[Reason]:
    """Return one reason per code of the objections, with what each build accepts.

    Where one build lacks only a part of what another one lacks, the other's further objections are left out.
    """
    sets = {frozenset([objection.code for objection in found]) for _, found in judged}
    least = [codes for codes in sets if not any([other < codes for other in sets])] if len(sets) > 1 else sets
    decisive = frozenset().union(*least)
    merged: dict[str, tuple[Objection, dict[Any, list[KernelBuild]]]] = {}
    for build, found in judged:
        for objection in found:
            if objection.code in decisive:
                accepted = merged.setdefault(objection.code, (objection, {}))[1]
                accepted.setdefault(objection.accepts, []).append(build)
    reasons = []
    every = tuple([build for build, _ in judged])
    for code, (objection, by_accepts) in merged.items():
        if code == "block-size":
            reason = block_size_reason(objection.observed, sorted(by_accepts))
            says = [f"{_labels(tuple(builds), every)}: multiples of {size}" for size, builds in by_accepts.items()]
        else:
            reason = Reason(code, "", objection.observed, list(by_accepts), objection.remedy)
            says = [f"{_labels(tuple(builds), every)}: {accepts}" for accepts, builds in by_accepts.items()]
        reasons.append(replace(reason, message=f"{objection.what} ({'; '.join(says)})"))
    return reasons


def _labels(builds: tuple[KernelBuild, ...], judged: tuple[KernelBuild, ...]) -> str:
    """Return ``FA3`` where these are all judged builds of that kernel, else ``FA3 of vllm and sgl-kernel``."""
    texts = []
    for kernel in dict.fromkeys(build.kernel for build in builds):
        names = [build.distribution for build in builds if build.kernel == kernel]
        every = sum(build.kernel == kernel for build in judged)
        texts.append(kernel if len(names) == every > 1 else f"{kernel} of {_listed(names, 'and')}")
    return " and ".join(texts)


def _listed(names: Iterable[str], conjunction: str) -> str:
    """Return ``a, b and c``."""
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def _not_installed(
    builds: Sequence[KernelBuild], environment: Environment, pins: Sequence[Pin[Any]], device: str
) -> Reason:
    reason = library_reason(list(dict.fromkeys(build.library for build in builds)), environment)
    kernels = _listed((build.kernel for build in builds), "or")
    why = f" with {describe_pins(pins)}" if pins else ""
    message = f"no usable package has {kernels} for {device}{why}: {reason.message}"
    return replace(reason, message=message, remedy=None)


def _no_such_build(builds: Sequence[KernelBuild], pins: Sequence[Pin[Any]], device: str) -> Reason:
    labels, pinned = [build.label for build in builds], describe_pins(pins)
    message = f"{pinned}: no such kernel for {device} (there are {', '.join(labels)})"
    return Reason("pinned-kernel", message, pinned, labels, pins[0].loosened)


def _under_pins(serving: Sequence[B], environment: Environment, pins: Sequence[Pin[B]]) -> str | None:
    """Return the pin to loosen where that reaches an installed build, or the command that installs a pinned one."""
    if installed := [build for build in serving if environment.has(build.library)]:
        return _loosened(installed, pins)
    for build in serving:
        # A command that brings another distribution does not help under the pin.
        if all(pin.keeps(build) for pin in pins) and build.distribution in build.library.install:
            return install_command(build.library, environment)
    return None


def _loosened(serving: Sequence[B], pins: Sequence[Pin[B]]) -> str | None:
    """Return the pin to loosen so that one of these builds is allowed: the first that is enough, else the first."""
    if not serving:
        return None
    for pin in pins:
        others = [other for other in pins if other is not pin]
        if any(all(other.keeps(build) for other in others) for build in serving):
            return pin.loosened
    return pins[0].loosened
