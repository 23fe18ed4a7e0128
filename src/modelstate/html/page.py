"""The page that shows a result in a browser, and the short table that shows it in a notebook.

A page is one file that loads nothing from elsewhere: style, script and data are inside it, and its content security
policy allows no other. Text from a checkpoint is data: jinja2 escapes it in the markup, and the script puts it into the
table as text.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from enum import Enum
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from modelstate.errors import PackageError
from modelstate.text_format import printable, printable_lines, shorten, size

if TYPE_CHECKING:
    import pandas
    from jinja2 import Template

Cell = str | int | float | None

_MOST_ROWS = 12
"""The most rows of a table that a notebook shows."""
_MOST_NOTES = 5
_CELL_WIDTH, _TEXT_WIDTH = 48, 4000
"""The most characters of a cell, and of the details, that a notebook shows."""


class ColumnKind(Enum):
    """What a column holds, which says how a module sums up the rows under it."""

    TEXT = "text"
    """Shown where all rows agree."""
    COUNT = "count"
    """A whole number; added up."""
    BYTES = "bytes"
    """Added up."""
    MEASURE = "measure"
    """A float; the greatest is shown."""
    LEAST = "least"
    """A float; the least is shown."""
    SHARE = "share"
    """A float from 0 to 1, as a percentage; the greatest is shown."""
    OWN = "own"
    """A float that says nothing about a module, such as a mean."""


_KINDS = {
    "Bytes": ColumnKind.BYTES,
    "Changed": ColumnKind.SHARE,
    "Infinite": ColumnKind.COUNT,
    "Max": ColumnKind.MEASURE,
    "Mean": ColumnKind.OWN,
    "Min": ColumnKind.LEAST,
    "NaN": ColumnKind.COUNT,
    "Std": ColumnKind.OWN,
    "Zeros": ColumnKind.SHARE,
}
"""The kinds of columns by their titles. Another column is a measure if it has a float, and text if it has none."""


class Page(msgspec.Struct, frozen=True):
    """The content of a page.

    Args:
        title: What the page is about.
        facts: Labels and texts at the top.
        columns: The titles of the columns. The first one has dotted names, by which rows are folded.
        rows: The rows of the table; a row may be shorter than `columns`.
        table: The heading of the table.
        text: Preformatted details, such as the problems of a plan.
        notes: Further remarks.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[Cell]] = ()
    table: str = "Tensors"
    text: str = ""
    notes: tuple[str, ...] = ()

    def to_html(self) -> str:
        """Returns the page as HTML."""
        style, script = _asset("page.css"), _asset("page.js")
        policy = "default-src 'none'; base-uri 'none'; form-action 'none'" + "".join(
            f"; {name}-src 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
            for name, text in (("style", style), ("script", script))
        )
        columns, rows = self._filled_columns(self.rows)
        data = {
            "columns": [{"title": title, "kind": kind.value} for title, kind in columns],
            "rows": [[_json_value(value) for value in row] for row in rows],
        }
        # Within a script element, only "<" can end it.
        encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        return self._rendered("page.html.j2", rows=rows, policy=policy, style=style, script=script, data=encoded)

    def fragment(self) -> str:
        """Returns the facts and the first rows as HTML without script, for a notebook."""
        columns, rows = self._filled_columns(self.rows[:_MOST_ROWS])
        cells = [
            [
                (shorten(printable(_cell_text(value, kind)), _CELL_WIDTH), kind)
                for value, (_, kind) in zip(row, columns, strict=True)
            ]
            for row in rows
        ]
        more = f"{len(self.rows) - _MOST_ROWS:,}" if len(self.rows) > _MOST_ROWS else ""
        return self._rendered(
            "notebook.html.j2",
            columns=columns,
            cells=cells,
            more=more,
            text_width=_TEXT_WIDTH,
            most_notes=_MOST_NOTES,
        )

    def _rendered(self, template: str, **values: object) -> str:
        return _template(template).render(
            title=printable(self.title),
            facts=[(label, printable(text)) for label, text in self.facts],
            text=printable_lines(self.text),
            notes=[*map(printable, self.notes)],
            table=self.table,
            **values,
        )

    def _filled_columns(self, rows: Sequence[Sequence[Cell]]) -> tuple[list[tuple[str, ColumnKind]], list[list[Cell]]]:
        """Returns the columns that have a value in one of these rows, and the rows with these columns alone."""
        full = [_filled(row, len(self.columns)) for row in rows]
        kept = [i for i in range(len(self.columns)) if i == 0 or any(row[i] not in (None, "") for row in full)]
        floats = [any(isinstance(row[i], float) for row in full) for i in kept]
        kinds = [ColumnKind.MEASURE if has_float else ColumnKind.TEXT for has_float in floats]
        columns = [(self.columns[i], _KINDS.get(self.columns[i], kind)) for i, kind in zip(kept, kinds, strict=True)]
        return columns, [[row[i] for i in kept] for row in full]


class Shown:
    """A result that a browser and a notebook can show: it returns its content as a `Page`."""

    __slots__ = ()

    def _page(self) -> Page:
        raise NotImplementedError

    def to_html(self) -> str:
        """Returns a page for a browser, in one file that loads nothing from elsewhere.

        Examples:
            >>> _ = pathlib.Path("checkpoint.html").write_text(modelstate.inspect({"w": torch.ones(2)}).to_html())
        """
        return self._page().to_html()

    def to_frame(self) -> pandas.DataFrame:
        """Returns the table of the page as a pandas DataFrame: a row for each tensor, step or checkpoint.

        Sizes are in bytes. What a row does not have is None or NaN.

        Raises:
            PackageError: pandas is not installed.

        Examples:
            >>> frame = modelstate.inspect({"w": torch.ones(2), "b": torch.ones(1)}).to_frame()
            >>> frame.sort_values("Bytes").Name.tolist()
            ['b', 'w']
        """
        try:
            import pandas
        except ImportError as error:
            raise PackageError("to_frame() needs pandas", remedy="pip install pandas") from error
        page = self._page()
        rows = [_filled(row, len(page.columns)) for row in page.rows]
        return pandas.DataFrame(rows, columns=list(page.columns))

    def _repr_html_(self) -> str:
        return self._page().fragment()


def _filled(row: Sequence[Cell], width: int) -> list[Cell]:
    return [*row, *[None] * (width - len(row))]


def _json_value(value: Cell) -> Cell:
    """Returns a value for JSON, which has no NaN or infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return printable(value) if isinstance(value, str) else value


def _cell_text(value: Cell, kind: ColumnKind) -> str:
    if value is None:
        return ""
    if kind is ColumnKind.BYTES and isinstance(value, int):
        return size(value)
    if isinstance(value, float):
        return f"{100 * value:.3g}%" if kind is ColumnKind.SHARE else f"{value:.4g}"
    return f"{value:,}" if kind is ColumnKind.COUNT else str(value)


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset(name))
