"""The pages that results are on. Each is measured, and written, by itself."""

from dataclasses import dataclass

from bench.sections import LOADS


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the documentation."""

    file: str
    title: str
    words: str
    """What its tables have in common, beside fresh processes in alternation."""
    parts: tuple[str, ...]
    """Of the harness, in the order in which they stand there."""
    goals: tuple[str, ...]
    """By their keys in `bench.goals.ROWS`."""


_LOADING = """The files are in the page cache, unless a title says that they are cold. Before the clock starts, the
target module is built (unless a title or the name of a contender says otherwise), and the contender has loaded and run
a tiny model once, so that imports and the start of threads do not count. What saving costs is in
[Benchmarks of saving](benchmarks_saving.md), what serving does in [Benchmarks of serving](benchmarks_serving.md).

- **ready**: from the file to the module with its weights. **×**: compared with the first row of the table.
- **own memory**: the most anonymous memory that the process grew by until then; pages of a mapped file are not in it.
- **with file pages**: the most resident memory that it grew by, those included."""

PAGES = (
    Page(
        "benchmarks.md",
        "Benchmarks",
        _LOADING,
        ("limits", *LOADS, "state-dict", "opening", "convert"),
        ("mapped", "first-forward", "own-memory", "in-place", "cold", "cast", "int8", "small", "many", "shards"),
    ),
    Page(
        "benchmarks_saving.md",
        "Benchmarks of saving",
        "**×**: compared with the first row of the table.",
        ("save",),
        ("save", "blocked", "frozen"),
    ),
    Page(
        "benchmarks_serving.md",
        "Benchmarks of serving",
        "**×**: compared with the first row of the table.",
        ("live", "serving"),
        ("torn", "swap", "request"),
    ),
)
PARTS = tuple(part for page in PAGES for part in page.parts)
