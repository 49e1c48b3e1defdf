"""The plugins of this environment as plain data and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from molt_core.plugins.manager import Plugins

if TYPE_CHECKING:
    from rich.table import Table


def as_data(plugins: Plugins) -> list[dict[str, Any]]:
    """One object per plugin; references are text and nothing is imported for them."""
    return [
        {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "status": record.status,
            "error": record.error,
            "note": record.note,
            "components": [
                {"kind": component.kind, "name": component.name, "reference": component.reference}
                for component in record.components
            ],
        }
        for record in plugins.records
    ]


def as_table(plugins: Plugins) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("plugin", "version", "status", "components")
    styles = {"loaded": "green", "disabled": "dim", "failed": "red", "incompatible": "yellow"}
    for record in plugins.records:
        by_kind: dict[str, list[str]] = {}
        for component in record.components:
            by_kind.setdefault(component.kind, []).append(component.name)
        lines = [f"{kind}: {', '.join(names)}" for kind, names in by_kind.items()]
        lines += [text for text in (record.error, record.note) if text]
        table.add_row(
            Text(record.key), record.version, Text(record.status, styles[record.status]), Text("\n".join(lines))
        )
    return table
