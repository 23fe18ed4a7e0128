"""Numbers and columns, as they are printed."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from modelstate.words import printable


def count(number: int, noun: str) -> str:
    """ "1 tensor", "20,000 tensors"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds(value: float) -> str:
    """ "12.3 ms", "1.23 s"."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def columns(rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), gap: int = 2) -> str:
    """Rows of text in aligned columns, without trailing blanks.

    Long lines are left to the terminal, so that a pipe gets one line a row. rich's own table takes seconds for the
    tens of thousands of rows that a checkpoint can have.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths: list[int] = []
    for row in cells:
        widths += [0] * (len(row) - len(widths))
        for i, cell in enumerate(row):
            widths[i] = max(widths[i], cell_len(cell))
    lines = []
    for row in cells:
        padded = []
        for i, cell in enumerate(row):
            blank = " " * (widths[i] - cell_len(cell))
            padded.append(blank + cell if i in right else cell + blank)
        lines.append((" " * gap).join(padded).rstrip())
    return "\n".join(lines)
