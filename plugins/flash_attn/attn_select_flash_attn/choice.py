"""Which FlashAttention build runs a layer, and why none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from attn_select.environment import WRONG_VERSION, Environment
from attn_select.gate import block_size_reason
from attn_select.spec import Library, Reason
from attn_select_flash_attn.providers import REMEDY_ORDER, Candidate, Kernel

ProviderName = Literal["auto", "vllm", "flash-attn-3", "flash-attn", "sglang-kernel", "sgl-kernel"]


Objection = tuple[str, Any]
"""One thing that speaks against one kernel: the code of the reason it becomes, and what the kernel takes instead, in a
few words (for ``block-size`` the page multiple in tokens)."""
Judged = Sequence[tuple[Kernel, Sequence[Objection]]]


class Subject(NamedTuple):
    """What an objection is about: the value by name and as data, and what would remove it in every kernel."""

    what: str
    observed: Any
    remedy: str | None = None


class Pin(NamedTuple):
    """What a user's options fix. ``option`` is the key of the version option of this backend."""

    backend: str
    option: str
    version: Literal["auto", 2, 3]
    provider: ProviderName

    def keep(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that the options leave."""
        return [
            c
            for c in candidates
            if self.version in ("auto", c.kernel.version) and self.provider in ("auto", c.library.distribution)
        ]

    def __str__(self) -> str:
        pinned = []
        if self.version != "auto":
            pinned.append(f"backends.{self.backend}.{self.option} = {self.version}")
        if self.provider != "auto":
            pinned.append(f'backends.{self.backend}.provider = "{self.provider}"')
        return ", ".join(pinned)

    def loosened(self) -> str:
        """Return the option to set so that every kernel is considered again."""
        option = self.option if self.version != "auto" else "provider"
        return f'backends.{self.backend}.{option} = "auto"'


def refuse(
    judged: Judged,
    candidates: Sequence[Candidate],
    environment: Environment,
    objections: Callable[[Kernel], Sequence[Objection]],
    describe: Callable[[str], Subject],
    device: str,
    pin: Pin | None,
) -> list[Reason]:
    """Return every reason why no candidate serves the layer; at least one.

    Args:
        judged: the installed candidates that the options leave, each with what speaks against it.
        candidates: all that the device can run.
        environment: says which of them are installed.
        objections: what speaks against any kernel.
        describe: what an objection's code is about.
        device: the compute capability as text.
        pin: what the options fix, if anything.
    """
    reasons: list[Reason] = []
    serving: list[Candidate] = []
    if len(judged) < len(candidates):
        tried = {id(kernel) for kernel, _ in judged}
        serving = [c for c in candidates if id(c.kernel) not in tried and not objections(c.kernel)]
    if not judged:
        left = candidates if pin is None else pin.keep(candidates)
        if left or pin is None:
            reasons.append(_not_installed(left, environment, device, pin))
        else:
            reasons.append(_no_such_kernel(candidates, device, pin))
        # The layer may have obstacles of its own in every kernel: they are named too.
        judged = [(c.kernel, objections(c.kernel)) for c in left]
    if all(found for _, found in judged):
        reasons += _merge(judged, describe)
    if serving and (remedy := _remedy(serving, environment, pin)) is not None:
        for reason in reasons:
            reason.remedy = remedy if pin is not None else reason.remedy or remedy
    return reasons


def _no_such_kernel(candidates: Sequence[Candidate], device: str, pin: Pin) -> Reason:
    labels = [c.kernel.label for c in candidates]
    message = f"{pin}: no such kernel for compute capability {device} (there are {', '.join(labels)})"
    return Reason("pinned-kernel", message, str(pin), labels, pin.loosened())


def _not_installed(left: Sequence[Candidate], environment: Environment, device: str, pin: Pin | None) -> Reason:
    libraries = dict.fromkeys(c.library for c in left)
    states = {library.distribution: environment.state(library) for library in libraries}
    listing = "; ".join(_standing(library, environment) for library in libraries)
    why = f" ({pin})" if pin else ""
    paths = " or ".join(sorted({c.path for c in left}))
    message = f"no usable package has {paths} for compute capability {device}{why}: {listing}"
    code = "library-version" if WRONG_VERSION in states.values() else "library-missing"
    return Reason(code, message, states, list(states))


def _standing(library: Library, environment: Environment) -> str:
    name = library.distribution
    if environment.state(library) == WRONG_VERSION:
        return f"{name} {environment.known_version(library)} (needs {library.version})"
    return f"{name} is {environment.state(library)}"


def _remedy(serving: Sequence[Candidate], environment: Environment, pin: Pin | None) -> str | None:
    """Return how to get at one of the candidates that would serve: loosen the pin, or install it."""
    if pin is not None and any(environment.has(c.library) for c in serving):
        return pin.loosened()
    libraries = [c.library for c in (serving if pin is None else pin.keep(serving))]
    return next((library.install for library in (*REMEDY_ORDER, *libraries) if library in libraries), None)


def _merge(judged: Judged, describe: Callable[[str], Subject]) -> list[Reason]:
    """Return one reason per code, which says what each kernel takes.

    Where one kernel lacks a part of what another lacks, the rest of the other is no news and is left out.
    """
    sets = {frozenset([code for code, _ in found]) for _, found in judged}
    decisive = {code for codes in sets if not any(other < codes for other in sets) for code in codes}
    by_code: dict[str, dict[Any, list[Kernel]]] = {}
    for kernel, found in judged:
        for code, accepts in found:
            if code in decisive:
                by_code.setdefault(code, {}).setdefault(accepts, []).append(kernel)
    reasons = []
    for code, accepted in by_code.items():
        what, observed, remedy = describe(code)
        if code == "block-size":
            reason = block_size_reason(observed, sorted(accepted))
            says = [f"{_labels(kernels, judged)}: multiples of {pages}" for pages, kernels in accepted.items()]
            reason.message = f"{what} ({'; '.join(says)})"
        else:
            says = [f"{_labels(kernels, judged)}: {accepts}" for accepts, kernels in accepted.items()]
            reason = Reason(code, f"{what} ({'; '.join(says)})", observed, list(accepted), remedy)
        reasons.append(reason)
    return reasons


def _labels(kernels: Sequence[Kernel], judged: Judged) -> str:
    """Return ``FA3`` where these are all of that version, else ``FA3 of vllm, sglang-kernel and sgl-kernel``."""
    texts = []
    for version in sorted({kernel.version for kernel in kernels}, reverse=True):
        names = [kernel.library.distribution for kernel in kernels if kernel.version == version]
        every = sum(kernel.version == version for kernel, _ in judged)
        listed = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        texts.append(f"FA{version}" if len(names) == every > 1 else f"FA{version} of {listed}")
    return " and ".join(texts)
