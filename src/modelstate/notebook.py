"""The short table that shows a result in a notebook, and all rows of it as a pandas DataFrame.

Text from a checkpoint is data: it is escaped in the markup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from modelstate.errors import PackageError
from modelstate.text_format import printable, printable_lines, shorten

if TYPE_CHECKING:
    import pandas

Cell = str | int | float | None

_MOST_ROWS = 12
_TABLE = (
    # The style sheets of notebooks align all cells to the right, and wrap long ones in narrow columns.
    "<style>table.modelstate th, table.modelstate td {{ text-align: left !important; white-space: nowrap; }} "
    "table.modelstate .n {{ text-align: right !important; }}</style>"
    '<div style="overflow-x: auto"><table class="modelstate">'
    "<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
)


@dataclass(frozen=True, slots=True)
class Overview:
    """What a notebook shows of a result.

    Args:
        title: What it is about.
        facts: Labels and texts at the top.
        columns: The titles of the columns.
        rows: The rows of the table; a row may be shorter than `columns`.
        text: Preformatted details, such as the problems of a plan.
        notes: Further remarks.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[Cell]] = ()
    text: str = ""
    notes: tuple[str, ...] = ()

    @property
    def filled(self) -> list[list[Cell]]:
        """The rows, all as long as `columns`."""
        return [[*row, *[None] * (len(self.columns) - len(row))] for row in self.rows]


class Shown:
    """A result that a notebook can show: it returns its content as an `Overview`."""

    __slots__ = ()

    def _overview(self) -> Overview:
        raise NotImplementedError

    def to_frame(self) -> "pandas.DataFrame":
        """Returns the rows of the result as a pandas DataFrame: one for each tensor, step or checkpoint.

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
        overview = self._overview()
        return pandas.DataFrame(overview.filled, columns=list(overview.columns))

    def _repr_html_(self) -> str:
        """Returns the facts and the first rows as HTML without script, without columns that have no value in them."""
        overview = self._overview()
        facts = " · ".join(f"{escape(label)}: {escape(printable(text))}" for label, text in overview.facts)
        left = len(overview.rows) - _MOST_ROWS
        parts = [
            f"<p><b>{escape(printable(overview.title))}</b><br>{facts}</p>",
            f"<pre>{escape(shorten(printable_lines(overview.text), 4000))}</pre>" if overview.text else "",
            "".join(f"<p>{escape(printable(note))}</p>" for note in overview.notes[:5]),
            _table(overview) if overview.rows else "",
            f"<p>and {left:,} more</p>" if left > 0 else "",
        ]
        return "".join(parts)


def _table(overview: Overview) -> str:
    columns = list(zip(*overview.filled[:_MOST_ROWS], strict=True))
    head, cells = [], []
    for title, column in zip(overview.columns, columns, strict=True):
        if any(value not in (None, "") for value in column):
            name = "" if any(isinstance(value, str) for value in column) else " class=n"
            head.append(f"<th{name}>{escape(title)}</th>")
            cells.append([f"<td{name}>{escape(shorten(printable(_text(value)), 48))}</td>" for value in column])
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
    return _TABLE.format(head="".join(head), body=body)


def _text(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value
