"""Compiles the written values of one ``when`` field into a predicate."""

from __future__ import annotations

import fnmatch
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from attn_select.errors import UnknownNameError, nearest, show
from attn_select.layer import dtypes

Predicate = Callable[[Any], bool]


class ConditionError(ValueError):
    """A condition that cannot be understood; the message names field, value and what is accepted."""

    def __init__(self, message: str, problems: Sequence[tuple[tuple[str, ...], str]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems) or (((), message),)


def booleans(field: str, values: Sequence[object]) -> Predicate:
    """Compile ``true`` and ``false``."""
    for value in values:
        if not isinstance(value, bool):
            raise ConditionError(f"{field} = {show(value)}: expected true or false")
    return frozenset(values).__contains__


def numbers(field: str, values: Sequence[object]) -> Predicate:
    """Compile numbers and comparisons: ``16``, ``"<=16"``, ``">=64,<=128"``."""
    alternatives: list[Predicate] = []
    for value in values:
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError
            bounds = [(sign, float(operand)) for sign, operand in _comparisons(str(value))]
            if not all(math.isfinite(bound) and bound >= 0 for _, bound in bounds):
                raise ValueError
        except ValueError:
            accepted = 'expected a number from 0 on, or a string such as "<=16" or ">=64,<=128"'
            raise ConditionError(f"{field} = {show(value)}: {accepted}") from None
        alternatives.append(_all(_compare(sign, bound) for sign, bound in bounds))
    return _any(alternatives)


def names(field: str, values: Sequence[object], valid: Sequence[str], spellings: Sequence[str]) -> Predicate:
    """Compile names and patterns of an enumerated field. The predicate takes a tuple of names for one value."""
    accepted: set[str] = set()
    for value in values:
        if not isinstance(value, str):
            raise ConditionError(f"{field} = {show(value)}: expected {', '.join(valid)} or a pattern with *")
        pattern = dtypes.canonical(value) if "dtype" in field else value.strip()
        found = [name for name in valid if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            hint = UnknownNameError("name", value, spellings).hint
            raise ConditionError(f"{field} = {show(value)} matches no value; {hint}")
        accepted.update(found)
    return lambda names: not accepted.isdisjoint(names)


def capabilities(field: str, values: Sequence[object]) -> Predicate:
    """Compile compute capabilities, compared as pairs of numbers: ``9.x``, ``>=8.9``."""
    alternatives: list[Predicate] = []
    for value in values:
        try:
            if not isinstance(value, str):
                raise ValueError
            alternatives.append(_all(_capability(sign, operand) for sign, operand in _comparisons(value)))
        except ValueError:
            accepted = 'expected a string such as "9.x", "8.9", ">=8.0" or ">=8.0,<10.0"'
            raise ConditionError(f"{field} = {show(value)}: {accepted}") from None
    return _any(alternatives)


def _capability(sign: str, operand: str) -> Predicate:
    match = re.fullmatch(r"(\d{1,2})\.(\d{1,2}|x)", operand, re.ASCII)
    if match is None or (match[2] == "x" and sign not in ("==", "!=")):
        raise ValueError
    major = int(match[1])
    if match[2] == "x":
        return lambda capability: (capability[0] == major) is (sign == "==")
    return _compare(sign, (major, int(match[2])))


def gpus(field: str, values: Sequence[object], warnings: list[str]) -> Predicate:
    """Compile GPU names and patterns of them. A name that no known GPU has is a warning: new GPUs appear."""
    patterns: set[str] = set()
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise ConditionError(f'{field} = {show(value)}: expected a name such as "h20" or a pattern such as "rtx*"')
        patterns.add(_gpu(value.strip().casefold(), warnings))
    return _any(map(_glob, patterns))


def archs(field: str, values: Sequence[object]) -> Predicate:
    """Compile names of AMD's architectures and patterns of them: ``gfx942``, ``gfx11*``."""
    for value in values:
        if not isinstance(value, str) or not re.fullmatch(r"gfx[0-9a-f*?]+", value):
            raise ConditionError(
                f'{field} = {show(value)}: expected a name such as "gfx942" or a pattern such as "gfx11*"'
            )
    return _any(_glob(str(value)) for value in values)


def _gpu(text: str, warnings: list[str]) -> str:
    """Return the canonical name where ``text`` is any name of a known GPU, else ``text``."""
    from attn_select.machine import device

    if text == "cpu":  # saves reading the table for the packaged rules
        return text
    known = [*device.known_gpus(), "cpu"]
    if _is_pattern(text):
        if not any(map(_glob(text), known)):
            warnings.append(f"gpu = {show(text)} matches no GPU of `attn-select gpus`")
    elif (found := device.find_gpu(text)) is not None:
        return found.name
    else:
        near = nearest(text, known)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        warnings.append(f"gpu = {show(text)} is not a GPU that `attn-select gpus` lists{hint}")
    return text


def versions(field: str, values: Sequence[object]) -> Predicate:
    """Compile PEP 440 ranges; a bare version means that very one."""
    return _any(_version(field, value) for value in values)


def _version(field: str, value: object) -> Predicate:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # few rules ask for versions
    from packaging.version import InvalidVersion, Version

    text = value.strip() if isinstance(value, str) else ""
    try:
        if not text:
            raise InvalidSpecifier
        specifiers = SpecifierSet(text if text[0] in "<>=!~" else f"=={text}")
    except InvalidSpecifier:
        accepted = 'expected a version range such as "<0.7" or ">=12.8,<13"'
        raise ConditionError(f"{field} = {show(value)}: {accepted}") from None

    def matches(version: str) -> bool:
        try:
            return specifiers.contains(Version(version), prereleases=True)
        except InvalidVersion:  # built by hand; which counts as unknown
            return False

    return matches


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,  # two characters before one
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def _comparisons(text: str) -> Iterator[tuple[str, str]]:
    """Split ``">=8,<16"`` into sign and operand pairs; no sign means equal."""
    for part in text.split(","):
        part = part.strip()
        written = next((sign for sign in _COMPARISONS if part.startswith(sign)), "")
        yield written or "==", part.removeprefix(written).strip()


def _compare(sign: str, bound: Any) -> Predicate:
    compare = _COMPARISONS[sign]
    return lambda value: compare(value, bound)


def _is_pattern(text: str) -> bool:
    return not {"*", "?", "["}.isdisjoint(text)


def _glob(pattern: str) -> Predicate:
    if not _is_pattern(pattern):
        return functools.partial(operator.eq, pattern)
    compiled = re.compile(fnmatch.translate(pattern))
    return lambda value: compiled.match(value) is not None


def _any(predicates: Iterable[Predicate]) -> Predicate:
    found = list(predicates)
    return found[0] if len(found) == 1 else lambda value: any(predicate(value) for predicate in found)


def _all(predicates: Iterable[Predicate]) -> Predicate:
    found = list(predicates)
    return found[0] if len(found) == 1 else lambda value: all(predicate(value) for predicate in found)
