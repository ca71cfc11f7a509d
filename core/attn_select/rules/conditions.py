"""``when`` conditions: one field of the config, the workload, the device or the environment against written values.

A list means any of its values, a comma inside a string means all (``">=64,<=128"``). An unset field matches ``"none"``
alone. The fields of the workload (``batch``, ``seq_len``, …) hold where they do for every batch shape of the phase.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from attn_select.errors import UnknownNameError, show
from attn_select.layer import config, dtypes, state
from attn_select.rules import predicates
from attn_select.rules.predicates import ConditionError, Predicate

NAMES: dict[str, tuple[str, ...]] = {
    "dtype": dtypes.DTYPES,
    "kv_cache_dtype": dtypes.KV_CACHE_DTYPES,
    "attn_type": config.ATTENTION_TYPES,
    "output_quantization": dtypes.OUTPUT_QUANTIZATIONS,
    "cuda_graph": config.CUDA_GRAPH_LEVELS,
    "recurrence": state.RECURRENCES,
    "state_dtype": dtypes.DTYPES,
}
"""The values of fields that take names."""
_CONFIG = config.AttentionConfig.model_fields
_BOOLEANS = ("mla", "sparse", *(name for name, item in _CONFIG.items() if item.annotation is bool))
OF_BATCH = {
    "batch": "num_requests",
    "seq_len": "max_seq_len",
    "query_len": "max_query_len",
    "kv_tokens": "num_kv_tokens",
    "pairs": "num_pairs",
    "effective_batch": "effective_requests",
}
"""Fields of the workload: each with the attribute of a batch shape that it compares."""
UNSET = "none"
"""What is written for a number that a layer does not have."""
_MAY_BE_UNSET = ("sliding_window", "attention_chunk_size", "logits_soft_cap", "v_head_size")
_SIZES = [name for name in (*_CONFIG, *state.StateConfig.model_fields) if name not in {*_BOOLEANS, *NAMES}]
_OF_DEVICE = ("gpu", "compute_capability", "arch", "sm_count", "memory_gib", "bandwidth_gbps")
_NUMBERS = (*dict.fromkeys(_SIZES), *OF_BATCH, "sm_count", "memory_gib", "bandwidth_gbps")
_TEXTS = ("gpu", "compute_capability", "arch", "cuda", "library")
FIELDS: tuple[str, ...] = (*_BOOLEANS, *_NUMBERS, *NAMES, *_TEXTS)
"""Every name that may stand in ``when``."""

_LONGEST = 200


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """One compiled condition."""

    field: str  # ``num_heads``, ``compute_capability``, ``library.flashinfer-python``, …
    written: tuple[Any, ...]  # the values as written in the file
    # called with the field's value, which is never None. Fields that take names get a tuple: all the names that the
    # value goes by (``kv_cache_dtype`` ``auto`` is also the dtype that it stands for)
    matches: Predicate
    unset: bool = False  # whether a layer that does not have the field matches too

    @property
    def scope(self) -> Literal["config", "workload", "device", "environment"]:
        """Where the value comes from."""
        if self.field in OF_BATCH:
            return "workload"
        if self.field == "cuda" or self.field.startswith("library."):
            return "environment"
        return "device" if self.field in _OF_DEVICE else "config"

    def __reduce__(self) -> tuple[Any, ...]:
        return _compile, (self.field, list(self.written), [])  # a predicate is a closure, which cannot be pickled

    def __str__(self) -> str:
        values = " or ".join(str(w).lower() if isinstance(w, bool) else str(w) for w in self.written)
        return f"{self.field} {values}"


def is_boolean(field: str) -> bool:
    """Whether ``field`` takes true or false."""
    return field in _BOOLEANS


def is_number(field: str) -> bool:
    """Whether ``field`` takes numbers and comparisons."""
    return field in _NUMBERS


def accepted_names(field: str) -> tuple[str, ...]:
    """Return the values of an enumerated field, aliases of dtypes included; empty for other fields."""
    names = NAMES.get(field, ())
    return (*names, *(a for a, full in dtypes.ALIASES.items() if full in names)) if "dtype" in field else names


def compile_when(when: object) -> tuple[tuple[Condition, ...], list[str]]:
    """Compile a ``when`` table. Returns the conditions and warnings."""
    if not isinstance(when, dict):
        raise ConditionError(f"when = {show(when)}: expected a table such as {{ mla = true }}")
    conditions: list[Condition] = []
    warnings: list[str] = []
    problems: list[tuple[tuple[str, ...], str]] = []
    for name, value in when.items():
        fields: dict[tuple[str, ...], object] = {(name,): value}
        if name == "library" and isinstance(value, dict):
            fields = {(name, library): version for library, version in value.items()}
        for key, each in fields.items():
            try:
                conditions.append(_compile(_field(key, each), each, warnings))
            except ConditionError as error:
                problems.append((key, str(error)))
    if problems:
        raise ConditionError("; ".join(text for _, text in problems), problems)
    return tuple(conditions), warnings


def _field(key: tuple[str, ...], value: object) -> str:
    """Return the field's name in one piece (``library.torch``)."""
    if key[0] not in FIELDS:
        raise ConditionError(f"unknown field {show(key[0])} in when; {UnknownNameError('field', key[0], FIELDS).hint}")
    if key == ("library",):
        raise ConditionError(f'library = {show(value)}: expected library.NAME = "<1.2"')
    if key[0] == "library" and not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", key[1]):
        raise ConditionError(f"library.{show(key[1])}: expected the name of a distribution such as flashinfer-python")
    return ".".join(key)


def _compile(field: str, value: object, warnings: list[str]) -> Condition:
    values = tuple(value) if isinstance(value, list) else (value,)
    if not values:
        raise ConditionError(f"{field} = []: an empty list matches nothing")
    for each in values:
        if isinstance(each, str) and len(each) > _LONGEST:
            raise ConditionError(f"{field} = {show(each)}: expected at most {_LONGEST} characters")
    given = values
    if unset := field in _MAY_BE_UNSET and UNSET in values:
        given = tuple(each for each in values if each != UNSET)
    if is_boolean(field):
        compiled = predicates.booleans(field, values)
    elif is_number(field):
        compiled = predicates.numbers(field, given)
    elif field in NAMES:
        compiled = predicates.names(field, values, NAMES[field], accepted_names(field))
    elif field == "compute_capability":
        compiled = predicates.capabilities(field, values)
    elif field == "arch":
        compiled = predicates.archs(field, values)
    elif field == "gpu":
        compiled = predicates.gpus(field, values, warnings)
    else:
        compiled = predicates.versions(field, values)
    return Condition(field, values, compiled, unset)
