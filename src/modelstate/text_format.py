"""Formats sizes, counts, durations, values and untrusted text for messages and tables."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterable, Sequence

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_UNITS = ("kB", "MB", "GB", "TB", "PB")
given_directories: dict[str, str] = {}
"""The directories of the relative paths that callers gave, as they wrote them, by their absolute paths."""


def size(nbytes: float) -> str:
    """A number of bytes in decimal units: "512 B", "1.5 kB", "90.9 MB"."""
    if round(nbytes) < 1000:
        return f"{nbytes:.0f} B"
    value = float(nbytes)
    for unit in _UNITS:
        value /= 1000
        if round(value, 1) < 1000 or unit == _UNITS[-1]:
            break
    return f"{value:,.1f} {unit}"


def printable(text: str) -> str:
    """Escapes the characters of untrusted text that would move the cursor or break the line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Like `printable`, for text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def note_given(path: str, given: str) -> None:
    """Notes how the caller wrote an absolute path, for `as_given`."""
    given = given.rstrip(os.sep)
    is_directory = os.path.basename(given) in ("", ".", "..")
    directory = path if is_directory else os.path.dirname(path)
    if not directory.strip(os.sep):  # the root, whose path is a part of every path and URL
        return
    if os.path.isabs(given):
        given_directories.pop(directory, None)
    else:
        given_directories[directory] = given if is_directory and given != os.curdir else os.path.dirname(given)


def as_given(text: str) -> str:
    """The text with relative paths where the caller gave relative ones, as long as they still lead there."""
    # A copy is made at once; `items()` of the original would notice that another thread notes a path meanwhile.
    noted = [item for item in given_directories.copy().items() if item[0] in text]
    for directory, given in sorted(noted, key=lambda item: -len(item[0])):
        try:
            leads_there = os.path.join(os.getcwd(), given).rstrip(os.sep) == directory.rstrip(os.sep)
        except OSError:  # the working directory was removed
            return text
        if leads_there or os.path.abspath(given) == directory:
            below = os.path.join(given, "").replace("\\", r"\\")
            text = re.sub(rf"(?<![\w./~-]){re.escape(directory)}/", below, text)
    return text


def excerpt(data: bytes) -> str:
    """Bytes for a message, as text where they are text."""
    return printable(data.decode(errors="backslashreplace"))


def safe_repr(value: object) -> str:
    """The repr of a value; where its class fails to return one, the class and the error."""
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__}, whose repr raises {type(error).__name__}>"


class _ShortRepr(reprlib.Repr):
    """Shows the first items of large containers, and does not fail for values whose class does."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _SHORT

    def repr_instance(self, x: object, level: int) -> str:
        return shorten(safe_repr(x), _SHORT)


_SHORT = 200


def short_repr(value: object) -> str:
    """The repr of a value that a caller gave or a file holds, in at most 200 characters, for the text of an error."""
    try:
        return shorten(_ShortRepr().repr(value), _SHORT)
    except Exception:  # an integer of too many digits, or a class with the name of a container
        return shorten(safe_repr(value), _SHORT)


def in_a_line(text: str) -> str:
    """The text of a modelstate error in one line, without its remedy and its link."""
    lines = (line.strip() for line in text.splitlines() if not line.startswith(("  more:", "  to do:")))
    return printable("; ".join(lines))


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 tensor", "20,000 tensors"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def seconds(value: float) -> str:
    """A duration: "12.3 ms", "1.23 s"."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, so that every program can read it."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def listed(items: Iterable[str], most: int = 6, between: str = ", ") -> str:
    """The first items, and the number of further ones: "a, b, and 3 more"."""
    items = list(items)
    return between.join(items[:most]) + (f"{between}and {len(items) - most} more" if len(items) > most else "")


def shorten(text: str, width: int) -> str:
    """The text, cut to `width` characters with an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def without_numbers(name: str) -> str:
    """The name of a tensor with # for each part that is a number."""
    return _NUMBER.sub("#", name)


def folded(names: Iterable[str]) -> list[str]:
    """The distinct names with * for each part that is a number."""
    return list(dict.fromkeys(_NUMBER.sub("*", name) for name in names))


def folded_label(names: Sequence[str]) -> str:
    """The name in a row that stands for names that differ in numbers only: "layers.*.weight (12 ×)"."""
    return names[0] if len(names) == 1 else f"{folded(names[:1])[0]} ({len(names):,} ×)"


_WIDEST = 300
"""No column is wider: a hostile file may have a name of megabytes, which would add as many blanks to each row."""


def columns(
    rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), width: int | None = None, optional: Sequence[int] = ()
) -> str:
    """Formats rows of text in aligned columns, without trailing blanks.

    Without `width`, long lines are left to the terminal, so that a pipe gets one line for each row. The table of rich
    takes seconds for the tens of thousands of rows that a checkpoint can have.

    Args:
        rows: The cells of each row; rows may differ in length.
        right: The indices of the columns that are aligned to the right.
        width: The most characters of a line; None for any number.
        optional: The indices of columns that are left out, empty ones first, until a line fits. The first row has
            titles; a line at the end has those of the columns that are left out.

    Examples:
        >>> print(columns([["weight", "4"], ["bias", "16"]], right=[1]))
        weight   4
        bias    16
    """
    from rich.cells import cell_len  # `import modelstate` does not need it

    cells = [[printable(cell) for cell in row] for row in rows]
    widths: list[int] = []
    for row in cells:
        widths += [0] * (len(row) - len(widths))
        for i, cell in enumerate(row):
            widths[i] = max(widths[i], min(cell_len(cell), _WIDEST))
    left_out: list[int] = []
    for i in sorted(optional, key=lambda i: any(row[i : i + 1] not in ([], [""]) for row in cells[1:])):
        if width is None or sum(widths) + 2 * (len(widths) - len(left_out) - 1) <= width:
            break
        widths[i] = 0
        left_out.append(i)
    lines = []
    for row in cells:
        padded = []
        for i, cell in enumerate(row):
            if i in left_out:
                continue
            blank = " " * (widths[i] - cell_len(cell))
            padded.append(blank + cell if i in right else cell + blank)
        lines.append("  ".join(padded).rstrip())
    if left_out:
        lines.append(f"not shown: {', '.join(cells[0][i] or 'notes' for i in sorted(left_out))}")
    return "\n".join(lines)


def quote(name: str) -> str:
    """A name for a message, shortened because a hostile file may contain a very long one."""
    return repr(name) if len(name) <= 200 else f"{name[:200]!r}… ({len(name):,} characters)"
