"""Options of a program, derived from its configuration model, and the configuration from files and options.

Every leaf of the model is one option with a dotted name: `--algo.advantage.estimator grpo`. A switch has a negative
form, `--no-ckpt.load_enable`; a fixed tuple takes as many values as it has; a list is repeated or separated by commas;
a table takes one option per key, `--env.args.KEY VALUE`, where VALUE is a TOML value if it can be read as one and text
otherwise; `none` unsets what may be unset. Later files win over earlier ones and options win over files, key by key.
Relative paths are relative to the current directory, those in files too.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from molt_core.config.toml import read_toml
from molt_core.config.validation import refuse_unknown_keys, submodel, validated
from molt_core.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
Form = Literal["value", "switch", "tuple", "list", "table"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One option: its path in the configuration, how it is written, and what the help says."""

    path: tuple[str, ...]
    form: Form
    arity: int
    metavar: str
    optional: bool
    help: str
    default: Any
    required: bool

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def name(self) -> str:
        return f"--{self.dotted}"


def flags(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[Flag]:
    """The options of a model, in the order of its fields."""
    for name, field in model.model_fields.items():
        section = submodel(field.annotation)
        if section is not None:
            yield from flags(section, (*prefix, name))
        else:
            yield _flag((*prefix, name), field)


def _flag(path: tuple[str, ...], field: FieldInfo) -> Flag:
    kind = _bare(field.annotation)
    origin, args = get_origin(kind), get_args(kind)
    form: Form = "value"
    arity, metavar = 1, _metavar(kind)
    if kind is bool:
        form = "switch"
    elif origin is dict:
        form = "table"
    elif origin is tuple and args[-1] is Ellipsis:
        form, metavar = "list", f"{_metavar(args[0])}[,...]"
    elif origin is tuple:
        form, arity, metavar = "tuple", len(args), " ".join(_metavar(_bare(arg)) for arg in args)
    default = field.get_default(call_default_factory=True)
    optional = NoneType in get_args(field.annotation)
    return Flag(path, form, arity, metavar, optional, field.description or "", default, field.is_required())


def _bare(annotation: Any) -> Any:
    """An annotation without ``None`` and without constraints."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    options = [arg for arg in get_args(annotation) if arg is not NoneType]
    if NoneType in get_args(annotation) and len(options) == 1:
        return _bare(options[0])
    return annotation


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    return {int: "INT", float: "FLOAT", Path: "PATH"}.get(kind, "TEXT")


def parse_text(text: str) -> Any:
    """A TOML value if the text is one on its own (dates excepted), the text otherwise."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"]
    return text if len(table) > 1 or isinstance(value, datetime.date | datetime.time) else value


def read_option(flag: Flag, given: Any) -> dict[str, Any]:
    """The table for one option as it was given: text, a bool, a tuple of texts, or several texts for a list."""
    value = given
    if flag.optional and given == "none":
        value = None
    elif flag.form == "list":
        value = [part for text in given for part in text.split(",") if part]
    return nested(flag.path, value)


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``base``, table by table."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """The table that has ``value`` at ``path``."""
    for key in reversed(path):
        value = {key: value}
    return value


def resolve(model: type[Model], files: Iterable[Path], options: Iterable[Mapping[str, Any]]) -> Model:
    """The configuration: files in order, then options (each a nested table) in order.

    ConfigError for what cannot be read, is unknown, has a wrong value, or is required and missing.
    """
    data: dict[str, Any] = {}
    for file in files:
        table = read_toml(file)
        try:
            refuse_unknown_keys(model, table, ".".join)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        data = merge(data, table)
    for option in options:
        data = merge(data, option)
    config = validated(model, data, lambda path: f"--{'.'.join(path)}")
    _refuse_missing(config)
    return config


def _refuse_missing(config: BaseModel) -> None:
    missing = [flag.name for flag in flags(type(config)) if "Required." in flag.help and not _at(config, flag.path)]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}; give a value on the command line or in a --config file")


def _at(config: Any, path: Sequence[str]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config
