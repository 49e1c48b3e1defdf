"""Configurations as TOML: reading files, and writing a resolved one that reads back the same."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from molt_core.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file; ConfigError names the file, and the line where the syntax is wrong."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read --config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def dump_toml(config: BaseModel) -> str:
    """The configuration as TOML. What is None is left out, which is its default where None is allowed."""
    import tomli_w

    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value if item is not None]
    return value
