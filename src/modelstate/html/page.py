"""The page that shows a result in a browser, and the short table that shows it in a notebook.

A page is one file that loads nothing from elsewhere: style, script and data are inside it, and its content security
policy allows no other. Text from a checkpoint is data: jinja2 escapes it in the markup, and the script puts it into the
table as text.
"""

import json
import math
from base64 import b64encode
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from modelstate.errors import PackageError
from modelstate.text_format import printable, printable_lines, shorten, size

if TYPE_CHECKING:
    import pandas
    from jinja2 import Template

Cell = str | int | float | None


_NOTEBOOK_TABLE = (
    # The style sheets of notebooks align all cells to the right, and wrap long ones in narrow columns.
    "<style>table.modelstate th, table.modelstate td {{ text-align: left !important; white-space: nowrap; }} "
    "table.modelstate .n {{ text-align: right !important; }}</style>"
    '<div style="overflow-x: auto"><table class="modelstate">'
    "<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
)


_MOST_ROWS = 12
"""The most rows of a table that a notebook shows."""
_MOST_LEVELS = 60
"""The parts of a name that become levels of a treemap; the rest is one level. A file may have names of very many."""


class Kind(Enum):
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


class Box(msgspec.Struct, frozen=True):
    """A rectangle of a chart, in units of the chart; `css` is its class in page.css."""

    x: float
    y: float
    width: float
    height: float
    title: str
    """Shown when the pointer is over it."""
    css: str
    label: str = ""
    text_x: float = 0.0
    text_y: float = 0.0
    end: bool = False
    """Whether the label ends at `text_x`."""


class Chart(msgspec.Struct, frozen=True):
    """A drawing with a title, in pixels."""

    title: str
    width: float
    height: float
    boxes: tuple[Box, ...]
    is_scaled: bool = False
    """Whether the drawing is as wide as the page, and not as wide as it says."""


class Page(msgspec.Struct, frozen=True):
    """The content of a page.

    Args:
        title: What the page is about.
        facts: Labels and texts at the top.
        columns: The titles and kinds of the columns. The first one has dotted names, by which rows are folded.
        rows: The rows of the table; a row may be shorter than `columns`.
        table: The heading of the table.
        text: Preformatted details, such as the problems of a plan.
        notes: Further remarks.
        charts: Drawings above the table.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    columns: tuple[tuple[str, Kind], ...] = ()
    rows: Sequence[Sequence[Cell]] = ()
    table: str = "Tensors"
    text: str = ""
    notes: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()

    def to_html(self) -> str:
        """Returns the page as HTML."""
        style, script = _asset("page.css"), _asset("page.js")
        sources = {"style-src": style, "script-src": script}
        policy = "default-src 'none'; base-uri 'none'; form-action 'none'" + "".join(
            f"; {name} 'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for name, text in sources.items()
        )
        table = self._without_empty_columns()
        data = {
            "columns": [{"title": title, "kind": kind.value} for title, kind in table.columns],
            "rows": [[_cell(value) for value in row] for row in table.rows],
        }
        # Within a script element, only "<" can end it.
        encoded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        charts = [chart for chart in self.charts if chart.boxes]
        return str(
            _template().render(
                page=replace(
                    self,
                    title=printable(self.title),
                    facts=tuple((label, printable(text)) for label, text in self.facts),
                    text=printable_lines(self.text),
                    notes=tuple(map(printable, self.notes)),
                ),
                charts=charts,
                policy=policy,
                style=style,
                script=script,
                data=encoded,
            )
        )

    def fragment(self) -> str:
        """Returns the facts and the first rows as HTML without script, for a notebook."""
        facts = " · ".join(f"{escape(label)}: {escape(printable(text))}" for label, text in self.facts)
        table = replace(self, rows=self.rows[:_MOST_ROWS])._without_empty_columns()
        classes = ["" if kind is Kind.TEXT else " class=n" for _, kind in table.columns]
        head = "".join(
            f"<th{name}>{escape(title)}</th>" for name, (title, _) in zip(classes, table.columns, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f"<td{name}>{escape(shorten(printable(_text(value, kind)), 48))}</td>"
                for value, name, (_, kind) in zip(row, classes, table.columns, strict=True)
            )
            + "</tr>"
            for row in table.rows
        )
        left = len(self.rows) - _MOST_ROWS
        parts = [
            f"<p><b>{escape(printable(self.title))}</b><br>{facts}</p>",
            f"<pre>{escape(shorten(printable_lines(self.text), 4000))}</pre>" if self.text else "",
            "".join(f"<p>{escape(printable(note))}</p>" for note in self.notes[:5]),
            _NOTEBOOK_TABLE.format(head=head, body=body) if self.rows else "",
            f"<p>and {left:,} more</p>" if left > 0 else "",
        ]
        return "".join(parts)

    def _without_empty_columns(self) -> "Page":
        rows = [_filled(row, len(self.columns)) for row in self.rows]
        kept = [i for i in range(len(self.columns)) if i == 0 or any(row[i] not in (None, "") for row in rows)]
        columns = tuple(self.columns[i] for i in kept)
        return replace(self, columns=columns, rows=[[row[i] for i in kept] for row in rows])


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

    def to_frame(self) -> "pandas.DataFrame":
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
        width = len(page.columns)
        return pandas.DataFrame(
            [_filled(row, width) for row in page.rows], columns=[title for title, _ in page.columns]
        )

    def _repr_html_(self) -> str:
        return self._page().fragment()


def area_chart(sizes: Iterable[tuple[str, int]]) -> Chart:
    """Draws where the bytes are, as a treemap: one box for each module, its area in proportion to the bytes.

    Modules are divided into their parts, the largest first, until there are about 60 boxes. The boxes are laid out by
    the squarified algorithm of Bruls, Huizing and van Wijk (2000). A prefix that all names have is left out.

    Args:
        sizes: Pairs of a dotted name and a number of bytes.
    """
    title, width, height = "Where the bytes are", 1000, 320  # in pixels
    leaves = [(tuple(name.split(".", _MOST_LEVELS - 1)), nbytes) for name, nbytes in sizes if nbytes > 0]
    while leaves and all(len(leaf) > 1 and leaf[0] == leaves[0][0][0] for leaf, _ in leaves):
        leaves = [(leaf[1:], nbytes) for leaf, nbytes in leaves]
    total = sum(nbytes for _, nbytes in leaves)
    if not total:
        return Chart(title, width, height, ())
    groups: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = {(): leaves}
    totals: dict[tuple[str, ...], int] = {(): total}
    whole: set[tuple[str, ...]] = set()
    while len(groups) < 60 and (divisible := groups.keys() - whole):
        path = max(divisible, key=lambda path: (totals[path], path))
        parts: dict[tuple[str, ...], list[tuple[tuple[str, ...], int]]] = {}
        for leaf, nbytes in groups[path]:
            parts.setdefault(leaf[: len(path) + 1], []).append((leaf, nbytes))
        if set(parts) == {path} or len(groups) + len(parts) > 120:
            whole.add(path)
            continue
        del groups[path]
        groups.update(parts)
        totals.update({part: sum(nbytes for _, nbytes in members) for part, members in parts.items()})
    tops = {top: i for i, top in enumerate(dict.fromkeys(path[:1] for path in groups))}
    areas = sorted(((totals[path], path) for path in groups), reverse=True)
    boxes = []
    for (nbytes, path), (x, y, w, h) in zip(
        areas, _squarified([nbytes * width * height / total for nbytes, _ in areas], width, height), strict=True
    ):
        name = ".".join(path)
        label = _tail(printable(name), int((w - 8) / 7.2)) if w > 50 and h > 16 else ""
        tip = f"{printable(name)}: {size(nbytes)}, {nbytes / total:.1%}"
        boxes.append(
            Box(_round(x), _round(y), _round(w), _round(h), tip, f"area{tops[path[:1]] % 6}", label, x + 4, y + 14)
        )
    return Chart(title, width, height, tuple(boxes), is_scaled=True)


def bar_chart(title: str, bars: Sequence[tuple[str, float, str]]) -> Chart:
    """Draws horizontal bars: a label and a value each, with the text that stands between them."""
    most = max((value for _, value, _ in bars), default=0)
    if not most:
        return Chart(title, 0, 0, ())
    boxes = []
    for i, (label, value, text) in enumerate(bars):
        tip = f"{printable(label)}: {text}"
        name = shorten(printable(label), 24)
        width = _round(max(400 * value / most, 1.0))
        boxes.append(Box(0, i * 22 + 2, 0, 18, tip, "none", name, 172, i * 22 + 16, end=True))
        boxes.append(Box(262, i * 22 + 2, width, 18, tip, "bar", text, 254, i * 22 + 16, end=True))
    return Chart(title, 670, len(bars) * 22 + 4, tuple(boxes))


def _squarified(areas: Sequence[float], width: float, height: float) -> list[tuple[float, float, float, float]]:
    """Places areas, the largest first, as x, y, width, height; each row is filled while its boxes become squarer."""
    placed: list[tuple[float, float, float, float]] = []
    x = y = 0.0
    i = 0
    while i < len(areas):
        side = min(width, height)
        row = [areas[i]]

        def worst(row: Sequence[float], side: float = side) -> float:
            total = sum(row)
            return max(side * side * max(row) / (total * total), total * total / (side * side * min(row)))

        while i + len(row) < len(areas) and worst([*row, areas[i + len(row)]]) <= worst(row):
            row.append(areas[i + len(row)])
        depth = sum(row) / side
        offset = 0.0
        for area in row:
            length = area / depth
            placed.append((x, y + offset, depth, length) if width >= height else (x + offset, y, length, depth))
            offset += length
        if width >= height:
            x, width = x + depth, max(width - depth, 1e-9)
        else:
            y, height = y + depth, max(height - depth, 1e-9)
        i += len(row)
    return placed


def _tail(text: str, width: int) -> str:
    """The text, cut to `width` characters at its beginning: the end of a name tells it from the others."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]


def _round(value: float) -> float:
    return round(value, 2)


def _filled(row: Sequence[Cell], width: int) -> list[Cell]:
    return [*row, *[None] * (width - len(row))]


def _cell(value: Cell) -> Cell:
    """A value for JSON, which has no NaN or infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return printable(value) if isinstance(value, str) else value


def _text(value: Cell, kind: Kind) -> str:
    if value is None:
        return ""
    if kind is Kind.BYTES and isinstance(value, int):
        return size(value)
    if kind is Kind.SHARE and isinstance(value, float):
        return f"{100 * value:.3g}%"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if kind is Kind.COUNT else str(value)


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


@cache
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_asset("page.html.j2"))
