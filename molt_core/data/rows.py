"""Rows of a JSONL file, read strictly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from molt_core.errors import ConfigError


def read_rows(path: str | Path, *, max_samples: int | None = None, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The objects of a JSONL file in UTF-8, one per line, at most the first ``max_samples``.

    ``ConfigError``, with file and line, for a missing or empty file, a byte-order mark, a blank line, a line that is
    not a JSON object, and a row without one of ``columns`` (`a|b`: without both). Lines beyond
    ``max_samples`` are not looked at.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path} is not a file, give the path of a JSONL file")
    rows: list[dict[str, Any]] = []
    with path.open("rb") as lines:  # in bytes, so that only a newline ends a line
        for number, line in enumerate(lines, 1):
            if max_samples is not None and len(rows) >= max_samples:
                break
            rows.append(_parse_row(line, f"{path}, line {number}", columns))
    if not rows:
        raise ConfigError(f"{path} has no rows, write one JSON object per line")
    return rows


def _parse_row(line: bytes, where: str, columns: Sequence[str]) -> dict[str, Any]:
    if line.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(f"{where}: starts with a byte-order mark, save the file as UTF-8 without one")
    if not line.strip():
        raise ConfigError(f"{where}: the line is blank, remove it")
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(row).__name__}")
    missing = [column for column in columns if not any(name in row for name in column.split("|"))]
    if missing:
        wanted = " or ".join(map(repr, missing[0].split("|")))
        raise ConfigError(f"{where}: no column {wanted}, this row has {', '.join(map(repr, row)) or 'none'}")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
