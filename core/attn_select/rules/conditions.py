"""``when`` conditions: one field of the config, the device or the environment against written values.

A list means any of its values, a comma inside a string means all (``">=64,<=128"``). An unset field never matches.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from attn_select import config as config_module
from attn_select import dtypes
from attn_select.errors import UnknownNameError, nearest, shorten

Predicate = Callable[[Any], bool]
Scope = Literal["config", "device", "environment"]

_BOOLEANS = "mla sparse alibi sinks mm_prefix non_causal batch_invariant per_head_quant_scales".split()
_NUMBERS = (
    "num_heads num_kv_heads head_size v_head_size block_size sliding_window logits_soft_cap kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim sparse_top_k decode_context_parallel_size num_speculative_tokens"
).split()
_NAMES: dict[str, tuple[str, ...]] = {
    "dtype": dtypes.DTYPES,
    "kv_cache_dtype": dtypes.KV_CACHE_DTYPES,
    "attn_type": get_args(config_module.AttentionType),
    "output_quantization": dtypes.OUTPUT_QUANTIZATIONS,
    "cuda_graph": config_module.CUDA_GRAPH_LEVELS,
}
_DEVICE_NUMBERS = ("sm_count", "memory_gib", "bandwidth_gbps")

FIELDS: tuple[str, ...] = (*_BOOLEANS, *_NUMBERS, *_NAMES, "gpu", "compute_capability", *_DEVICE_NUMBERS, "cuda", "library")
"""Every name that may stand in ``when``."""


class ConditionError(ValueError):
    """A condition that cannot be understood; the message names field, value and what is accepted."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One compiled condition.

    Attributes:
        field: ``num_heads``, ``compute_capability``, ``library.flashinfer-python``, …
        written: the values as written in the file.
        matches: called with the field's value, which is never None.
        samples: values at which two conditions on this field can be told apart; empty where that cannot be listed.
    """

    field: str
    written: tuple[Any, ...]
    matches: Predicate
    samples: tuple[Any, ...] = ()

    @property
    def scope(self) -> Scope:
        """Where the value comes from."""
        if self.field == "cuda" or self.field.startswith("library."):
            return "environment"
        return "device" if self.field in ("gpu", "compute_capability", *_DEVICE_NUMBERS) else "config"

    def __str__(self) -> str:
        values = " or ".join(str(w).lower() if isinstance(w, bool) else str(w) for w in self.written)
        return f"{self.field} {values}"


def is_boolean(field: str) -> bool:
    """Whether ``field`` takes true or false."""
    return field in _BOOLEANS


def is_number(field: str) -> bool:
    """Whether ``field`` takes numbers and comparisons."""
    return field in _NUMBERS or field in _DEVICE_NUMBERS


def accepted_names(field: str) -> tuple[str, ...]:
    """Return the values of an enumerated field, aliases of dtypes included; empty for other fields."""
    names = _NAMES.get(field, ())
    return (*names, *(a for a, full in dtypes.ALIASES.items() if full in names)) if "dtype" in field else names


def compile_when(when: object) -> tuple[tuple[Condition, ...], list[str]]:
    """Compile a ``when`` table. Returns the conditions and warnings.

    Raises:
        ConditionError: a field or value that is not accepted.
    """
    if not isinstance(when, dict):
        raise ConditionError(f"when = {shorten(repr(when))}: expected a table such as {{ mla = true }}")
    conditions: list[Condition] = []
    warnings: list[str] = []
    for name, value in when.items():
        if name == "library":
            if not isinstance(value, dict):
                raise ConditionError(f'library = {shorten(repr(value))}: expected library.NAME = "<1.2"')
            items = [(f"library.{library}", spec) for library, spec in value.items()]
        elif name in FIELDS:
            items = [(name, value)]
        else:
            raise ConditionError(_unknown(f"unknown field {shorten(repr(name))} in when", name, FIELDS))
        for field, written in items:
            values = tuple(written) if isinstance(written, list) else (written,)
            if not values:
                raise ConditionError(f"{field} = []: an empty list matches nothing")
            conditions.append(_compile(field, values, warnings))
    return tuple(conditions), warnings


def _compile(field: str, values: tuple[Any, ...], warnings: list[str]) -> Condition:
    predicates: list[Predicate] = []
    samples: list[Any] = []
    for value in values:
        if is_boolean(field):
            if not isinstance(value, bool):
                raise ConditionError(f"{field} = {shorten(repr(value))}: expected true or false")
            predicates.append(_equals(value))
            samples += (True, False)
        elif is_number(field):
            predicates.append(_number(field, value, samples))
        elif field == "compute_capability":
            predicates.append(_capability(value, samples))
        elif field == "gpu":
            predicates.append(_gpu(value, samples, warnings))
        elif field in _NAMES:
            predicates.append(_name(field, value, _NAMES[field]))
            samples += ((name,) for name in _NAMES[field])
        else:
            predicates.append(_version(field, value))
    matches = predicates[0] if len(predicates) == 1 else _any(predicates)
    return Condition(field, values, matches, tuple(samples))


def _equals(expected: Any) -> Predicate:
    return lambda value: value is expected


def _any(predicates: list[Predicate]) -> Predicate:
    return lambda value: any(predicate(value) for predicate in predicates)


def _all(predicates: list[Predicate]) -> Predicate:
    return predicates[0] if len(predicates) == 1 else lambda value: all(predicate(value) for predicate in predicates)


_COMPARISONS: dict[str, Callable[[Any], Predicate]] = {
    "<=": lambda bound: lambda value: bool(value <= bound),
    ">=": lambda bound: lambda value: bool(value >= bound),
    "==": lambda bound: lambda value: bool(value == bound),
    "!=": lambda bound: lambda value: bool(value != bound),
    "<": lambda bound: lambda value: bool(value < bound),
    ">": lambda bound: lambda value: bool(value > bound),
}


def _comparisons(text: str) -> Iterable[tuple[str, str]]:
    """Split ``">=8,<16"`` into operator and operand pairs; no operator means equal."""
    for part in text.split(","):
        match = re.fullmatch(r"\s*(<=|>=|==|!=|<|>)?\s*(\S+)\s*", part)
        if match is None:
            raise ValueError(text)
        yield match.group(1) or "==", match.group(2)


def _number(field: str, value: object, samples: list[Any]) -> Predicate:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        predicates = []
        for operator, operand in _comparisons(str(value)):
            bound = float(operand)
            if bound != bound or abs(bound) == float("inf"):
                raise ValueError
            predicates.append(_COMPARISONS[operator](bound))
            samples += (bound - 1, bound - 0.5, bound, bound + 0.5, bound + 1)
        return _all(predicates)
    except (ValueError, OverflowError):
        raise ConditionError(f'{field} = {shorten(repr(value))}: expected a number or a string such as "<=16" or ">=64,<=128"') from None


def _capability(value: object, samples: list[Any]) -> Predicate:
    accepted = 'expected a string such as "9.x", "8.9", ">=8.0" or ">=8.0,<10.0"'
    if not isinstance(value, str):
        raise ConditionError(f"compute_capability = {shorten(repr(value))}: {accepted}")
    predicates: list[Predicate] = []
    try:
        for operator, operand in _comparisons(value):
            match = re.fullmatch(r"(\d{1,2})\.(\d{1,2}|x)", operand)
            if match is None or (match.group(2) == "x" and operator not in ("==", "!=")):
                raise ValueError
            major = int(match.group(1))
            if match.group(2) == "x":
                predicates.append(_major(major, operator == "=="))
            else:
                predicates.append(_COMPARISONS[operator]((major, int(match.group(2)))))
    except ValueError:
        raise ConditionError(f"compute_capability = {shorten(repr(value))}: {accepted}") from None
    samples += ((major, minor) for major in range(5, 16) for minor in range(10))
    return _all(predicates)


def _major(major: int, equal: bool) -> Predicate:
    return lambda capability: (capability[0] == major) is equal


def _gpu(value: object, samples: list[Any], warnings: list[str]) -> Predicate:
    from attn_select import device

    if not isinstance(value, str) or not value.strip():
        raise ConditionError(f'gpu = {shorten(repr(value))}: expected a name such as "h20" or a pattern such as "rtx*"')
    known = [*device.known_gpus(), "cpu"]
    samples += known
    pattern = value.strip().casefold()
    if not re.search(r"[*?\[]", pattern):
        found = device.find_gpu(pattern)
        if found is not None:
            pattern = found.name
        elif pattern != "cpu":
            near = nearest(pattern, known)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            warnings.append(f"gpu = {shorten(repr(value))} is no GPU of `attn-select gpus`{hint}")
    return _glob(pattern)


def _glob(pattern: str) -> Predicate:
    if not re.search(r"[*?\[]", pattern):
        return lambda value: bool(value == pattern)
    compiled = re.compile(fnmatch.translate(pattern))
    return lambda value: compiled.match(value) is not None


def _name(field: str, value: object, valid: tuple[str, ...]) -> Predicate:
    """Match any of the names that a value goes by: ``kv_cache_dtype`` ``auto`` is also the dtype that it stands for."""
    if not isinstance(value, str):
        raise ConditionError(f"{field} = {shorten(repr(value))}: expected {', '.join(valid)} or a pattern with *")
    pattern = dtypes.canonical(value) if "dtype" in field else value.strip()
    if not any(fnmatch.fnmatchcase(name, pattern) for name in valid):
        raise ConditionError(_unknown(f"{field} = {shorten(repr(value))} matches no value", value, valid))
    match = _glob(pattern)
    return lambda names: any(match(name) for name in names)


def _version(field: str, value: object) -> Predicate:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        if not isinstance(value, str) or not value.strip():
            raise InvalidSpecifier
        text = value.strip()
        specifier = SpecifierSet(text if re.match(r"[<>=!~]", text) else f"=={text}")
    except InvalidSpecifier:
        raise ConditionError(f'{field} = {shorten(repr(value))}: expected a version range such as "<0.6.3" or ">=12.8,<13"') from None
    return lambda version: specifier.contains(version, prereleases=True)


def _unknown(message: str, name: str, valid: Iterable[str]) -> str:
    hint = UnknownNameError("name", str(name), valid).hint
    return f"{message}; {hint}"


def implies(narrow: tuple[Condition, ...], wide: tuple[Condition, ...]) -> bool:
    """Whether everything that matches ``narrow`` also matches ``wide``, as far as samples and spelling can tell."""
    by_field = {condition.field: condition for condition in narrow}
    for condition in wide:
        other = by_field.get(condition.field)
        if other is None:
            return False
        samples = (*condition.samples, *other.samples)
        if samples:
            if not all(condition.matches(s) for s in samples if other.matches(s)):
                return False
        elif condition.written != other.written:
            return False
    return True
