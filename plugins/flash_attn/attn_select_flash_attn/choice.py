"""Which FlashAttention build runs a layer, and why none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from attn_select.environment import Environment
from attn_select.gate import block_size_reason
from attn_select.spec import Reason
from attn_select_flash_attn.providers import REMEDY_ORDER, Candidate, Kernel

ProviderName = Literal["auto", "vllm", "flash-attn-3", "flash-attn", "sglang-kernel", "sgl-kernel"]


class Objection(NamedTuple):
    """One thing that speaks against one kernel.

    Attributes:
        code: the code of the reason it becomes.
        what: the name of the value, for the message.
        observed: the value seen.
        accepts: what this kernel takes instead, one clause; a page multiple in tokens for ``block-size``.
        remedy: what would remove it without another kernel.
    """

    code: str
    what: str
    observed: Any
    accepts: Any
    remedy: str | None = None


ObjectTo = Callable[[Kernel], Sequence[Objection]]


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


def first_serving(candidates: Sequence[Candidate], environment: Environment, objections: ObjectTo) -> Candidate | None:
    """Return the first installed candidate that nothing speaks against."""
    for candidate in candidates:
        if environment.has(candidate.library) and not objections(candidate.kernel):
            return candidate
    return None


def refuse(
    candidates: Sequence[Candidate], environment: Environment, objections: ObjectTo, device: str, pin: Pin | None
) -> list[Reason]:
    """Return every reason why no candidate serves the layer; at least one.

    ``candidates`` are all that the device can run, ``device`` is its capability as text, ``pin`` what the options fix.
    """
    left = candidates if pin is None else pin.keep(candidates)
    present = [c for c in left if environment.has(c.library)]
    reasons: list[Reason] = []
    if not left and pin is not None:
        reasons.append(_no_such_kernel(candidates, device, pin))
    elif not present:
        reasons.append(_not_installed(left, environment, device, pin))
    # With nothing installed the layer may have obstacles of its own in every kernel: they are named too.
    judged = [(c.kernel, objections(c.kernel)) for c in present or left]
    if all(found for _, found in judged):
        reasons += _merge(judged)
    if pin is not None and first_serving(candidates, environment, objections) is not None:
        for reason in reasons:
            reason.remedy = pin.loosened()
    elif (install := _remedy(left, environment, objections)) is not None:
        for reason in reasons:
            reason.remedy = reason.remedy or install
    return reasons


def _no_such_kernel(candidates: Sequence[Candidate], device: str, pin: Pin) -> Reason:
    labels = [c.kernel.label for c in candidates]
    message = f"{pin}: no such kernel for compute capability {device} (there are {', '.join(labels)})"
    return Reason("pinned-kernel", message, str(pin), labels, pin.loosened())


def _not_installed(left: Sequence[Candidate], environment: Environment, device: str, pin: Pin | None) -> Reason:
    states = {c.library.distribution: environment.state(c.library) for c in left}
    listing = ", ".join(f"{name} {state}" for name, state in states.items())
    why = f" ({pin})" if pin else ""
    paths = " or ".join(sorted({c.path for c in left}))
    message = f"no installed package has {paths} for compute capability {device}{why}: {listing}"
    return Reason("library-missing", message, states, list(states), None)


def _remedy(left: Sequence[Candidate], environment: Environment, objections: ObjectTo) -> str | None:
    serving = [c.library for c in left if not environment.has(c.library) and not objections(c.kernel)]
    return next((library.install for library in (*REMEDY_ORDER, *serving) if library in serving), None)


def _merge(judged: Sequence[tuple[Kernel, Sequence[Objection]]]) -> list[Reason]:
    """Return one reason per code, which says what each kernel takes."""
    by_code: dict[str, list[tuple[Kernel, Objection]]] = {}
    for kernel, found in judged:
        for objection in found:
            by_code.setdefault(objection.code, []).append((kernel, objection))
    reasons = []
    for code, pairs in by_code.items():
        first = pairs[0][1]
        accepted: dict[Any, list[Kernel]] = {}
        for kernel, objection in pairs:
            accepted.setdefault(objection.accepts, []).append(kernel)
        if code == "block-size":
            reason = block_size_reason(first.observed, sorted(accepted))
            says = [f"{_labels(kernels, judged)} multiples of {pages}" for pages, kernels in accepted.items()]
            reason.message += f"; {', '.join(says)}"
        else:
            says = [f"{_labels(kernels, judged)} {accepts}" for accepts, kernels in accepted.items()]
            reason = Reason(code, f"{first.what}: {'; '.join(says)}", first.observed, list(accepted), first.remedy)
        reasons.append(reason)
    return reasons


def _labels(kernels: Sequence[Kernel], judged: Sequence[tuple[Kernel, object]]) -> str:
    """Return ``FA3`` where these are all of that version, else ``FA3 of vllm and sglang-kernel``."""
    texts = []
    for version in sorted({kernel.version for kernel in kernels}, reverse=True):
        names = [kernel.library.distribution for kernel in kernels if kernel.version == version]
        every = sum(kernel.version == version for kernel, _ in judged)
        texts.append(f"FA{version}" if len(names) == every > 1 else f"FA{version} of {' and '.join(names)}")
    return ", ".join(texts)
