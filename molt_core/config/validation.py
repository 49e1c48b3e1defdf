"""From plain data to a pydantic model, with errors that name the option and the nearest match."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from molt_core.errors import ConfigError, did_you_mean

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str, ...]


def submodel(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model that an annotation holds, itself or in ``Model | None``."""
    for candidate in (annotation, *(a for a in get_args(annotation) if a is not NoneType)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def field_names(model: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    """The path of every leaf of a model."""
    for name, field in model.model_fields.items():
        nested = submodel(field.annotation)
        if nested is None:
            yield (*prefix, field.alias or name)
        else:
            yield from field_names(nested, (*prefix, field.alias or name))


def unknown_keys(model: type[BaseModel], data: Mapping[str, Any], prefix: Path = ()) -> Iterator[Path]:
    """Paths in ``data`` that ``model`` does not have; a model that allows extra keys has them all."""
    if model.model_config.get("extra") == "allow":
        return
    fields = {key: field for name, field in model.model_fields.items() for key in (name, field.alias) if key}
    for key, value in data.items():
        path = (*prefix, key)
        if key not in fields:
            yield path
            continue
        nested = submodel(fields[key].annotation)
        if nested is not None and isinstance(value, Mapping):
            yield from unknown_keys(nested, value, path)


def refuse_unknown_keys(model: type[BaseModel], data: Mapping[str, Any], name: Callable[[Path], str]) -> None:
    """ConfigError for keys that the model does not have. ``name`` writes a path the way the user would."""
    unknown = list(unknown_keys(model, data))
    if unknown:
        choices = [name(path) for path in field_names(model)]
        texts = [f"unknown option {name(path)}{did_you_mean(name(path), choices)}" for path in unknown]
        if not choices:
            texts = [f"{text} (it has no options)" for text in texts]
        raise ConfigError("; ".join(texts))


def validated(model: type[Model], data: Mapping[str, Any], name: Callable[[Path], str]) -> Model:
    """The model built from ``data``; ConfigError names every option that is unknown or has a wrong value."""
    refuse_unknown_keys(model, data, name)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_problem(item, name) for item in error.errors())) from None


def _problem(item: Any, name: Callable[[Path], str]) -> str:
    """One pydantic error as text: option, what it should be, what it was."""
    option = name(tuple(part for part in item["loc"] if isinstance(part, str)))
    if item["type"] == "missing":
        return f"{option} is required"
    value, message = item["input"], item["msg"]
    near = ""
    if item["type"] == "literal_error":
        near = did_you_mean(str(value), item["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
    elif item["type"] == "string_type" and isinstance(value, int | float):
        near = f"; for text write '\"{value}\"'"
    return f"{option}: {message[:1].lower()}{message[1:]}, got {value!r}{near}"
