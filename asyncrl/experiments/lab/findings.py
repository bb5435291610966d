"""The findings of a lab experiment: tables and a verdict, as text and JSON."""

from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.records import page_kit
from asyncrl.records.jsonl import JsonObject
from asyncrl.records.page_kit import TableBlock


@dataclass
class LabFindings:
    """The result of one experiment and its presentation.

    claims: (sentence of the verdict, whether this prior claim holds).
    """

    setting: str
    result: JsonObject
    claims: list[tuple[str, bool]]
    tables: list[TableBlock]

    def as_text(self) -> str:
        verdict = (f"\n  {'holds' if x else 'DOES NOT HOLD'}: {text}" for text, x in self.claims)
        tables = (table.as_text() for table in self.tables)
        return "\n\n".join([self.setting, *tables, "".join(["Verdict", *verdict])])

    def as_json(self) -> JsonObject:
        verdict = [{"text": text, "holds": holds} for text, holds in self.claims]
        values: JsonObject = page_kit.clean(self.result | {"verdict": verdict}, ".6g")
        return values


def make_table(
    heading: str, rows: Mapping[str, JsonObject], form: str = "{value:.3g}"
) -> TableBlock:
    """Build a table. rows: name -> column -> number, text or the values of `form`.

    Rounding errors of a float64 sum become 0.
    """

    def format_cell(cell: JsonObject | float | str) -> str:
        if isinstance(cell, str):
            return cell
        values = cell if isinstance(cell, dict) else {"value": cell}
        return form.format(**{name: round(x, 9) for name, x in values.items()})

    cells = [[name, *map(format_cell, row.values())] for name, row in rows.items()]
    head = ["", *(column.replace("_", " ") for column in next(iter(rows.values())))]
    return TableBlock(head, cells, heading=heading)


def transpose(columns: Mapping[str, JsonObject]) -> dict[str, JsonObject]:
    """Return the rows of a table. columns: name -> row -> cell."""
    names = next(iter(columns.values()))
    return {name: {column: x[name] for column, x in columns.items()} for name in names}
