"""The checks that configs of layers share: types of their fields, and errors that name field and value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, ClassVar, Self, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from attn_select.errors import ConfigError, UnknownNameError, show
from attn_select.layer import dtypes


def _canonical(value: object) -> object:
    value = dtypes.spelled(value)
    return dtypes.canonical(value) if isinstance(value, str) else value


MAX = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=MAX)]
HeadSize = Annotated[int, Field(ge=1, le=8192)]
DType = Annotated[dtypes.DTypeName, BeforeValidator(_canonical)]
KVCacheDType = Annotated[dtypes.KVCacheDTypeName, BeforeValidator(_canonical)]


class LayerFields:
    """What ``AttentionConfig`` and ``StateConfig`` do with their fields."""

    __slots__ = ()
    model_fields: ClassVar[Mapping[str, FieldInfo]]
    """Name of every field that can be given → its type, limits and default, as pydantic has them."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return a copy with other values for some fields; they are checked as at the start."""
        return type(self)(**{**self.model_dump(), **(update or {})})

    def model_dump(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """Return the fields that were given or filled in, as plain data."""
        values = {name: getattr(self, name) for name in self.model_fields}
        if not exclude_defaults:
            return values
        return {name: value for name, value in values.items() if value != self.model_fields[name].default}


def checked_model(config: type[Any]) -> type[BaseModel]:
    """Return the pydantic model of the fields that a dataclass of a layer is made of."""
    hints = get_type_hints(config, include_extras=True)
    given: dict[str, Any] = {
        each.name: (hints[each.name], ... if each.default is MISSING else each.default)
        for each in fields(config)
        if each.init
    }
    return create_model(config.__name__, __config__=ConfigDict(extra="forbid", strict=True), **given)


def checked_values(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every field of a layer."""
    try:
        return model(**data).__dict__
    except ValidationError as error:
        raise _config_error(error, list(model.model_fields)) from None


def refuse(contradictions: Iterable[tuple[tuple[str, ...], str]]) -> None:
    """Raise one ``ConfigError`` for all fields that contradict each other, each with its text."""
    if found := list(contradictions):
        named = dict.fromkeys(field for fields, _ in found for field in fields)
        raise ConfigError("; ".join(text for _, text in found), fields=named)


def _config_error(error: ValidationError, fields: list[str]) -> ConfigError:
    """Turn pydantic's errors into one ``ConfigError`` that names field, value and what is accepted."""
    parts: list[str] = []
    named: list[str] = []
    hint = None
    for item in error.errors(include_url=False):
        field = str(item["loc"][0])
        if item["type"] == "extra_forbidden":
            unknown = UnknownNameError("field", field, fields)
            parts.append(unknown.message)
            hint = unknown.hint
        elif item["type"] == "missing":
            parts.append(f"{field} is required (an integer from 1)")
        else:
            parts.append(f"{field} = {show(item['input'])}: {item['msg'][:1].lower()}{item['msg'][1:]}")
        named.append(field)
    return ConfigError("; ".join(parts), fields=dict.fromkeys(named), hint=hint)
