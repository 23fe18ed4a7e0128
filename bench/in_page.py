"""A table that a command puts into a page of the documentation, between two marks."""

import argparse
import io
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InPage:
    """A table with its place."""

    page: Path
    begin: str
    """The mark before the table."""
    end: str
    head: Sequence[str]
    rows: Callable[[], Iterable[Row]]
    """Makes the rows."""

    def written(self) -> list[str]:
        """The rows that the page has."""
        inside = self.page.read_text().partition(self.begin)[2].partition(self.end)[0]
        return [line for line in inside.splitlines() if line.startswith("| ")][1:]

    def main(self, words: str | None) -> None:
        """The command: prints the table, or writes it with `--write`."""
        parser = argparse.ArgumentParser(description=(words or "").splitlines()[0])
        parser.add_argument("--write", action="store_true", help=f"put the table into {self.page.name}")
        write = parser.parse_args().write
        with redirect_stderr(io.StringIO()):
            text = "\n".join([cells(self.head), "|---" * len(self.head) + "|", *map(cells, self.rows())])
        if not write:
            print(text)
            return
        before, _, rest = self.page.read_text().partition(self.begin)
        made = f"Seen on torch {torch.__version__.partition('+')[0]}.\n\n{text}"
        self.page.write_text(f"{before}{self.begin}\n{made}\n{self.end}{rest.partition(self.end)[2]}")


def cells(one: Iterable[str]) -> str:
    texts = [re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "\\<") for text in one]
    return f"| {' | '.join(texts)} |"
