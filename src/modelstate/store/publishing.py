"""A checkpoint into a store's directory, complete and durable or not at all; and out of it again."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from modelstate.errors import ModelStateError, UnsavableError
from modelstate.read.manifest import check_size
from modelstate.store.entries import Written, before_of, remove_directory, write_entry
from modelstate.store.layout import PIN_FILE, RECORD_FILE, Place, name_of, unfinished, unfinished_name
from modelstate.store.record import MAX_BYTES, Entry, Record
from modelstate.store.shelf import Found
from modelstate.write import system
from modelstate.write.draft import Draft
from modelstate.write.files import new_file, sync_directory


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint that is about to be written."""

    step: int
    kinds: Mapping[str, str]
    drafts: Mapping[str, Draft]
    """Of each object."""
    steady: Mapping[str, frozenset[str]]
    """Names of tensors, of each module, that training does not change."""
    metrics: Mapping[str, float]
    pin: bool
    begun: float
    time: float

    def check(self) -> None:
        """Raises `UnsavableError` for values that nobody would read again."""
        for path, made in self.drafts.items():
            with _too_much(path):
                check_size(made.manifest(None, {}))


def publish(
    directory: str,
    store: str,
    serial: int,
    job: Job,
    revisions: list[Found],
    before: Found | None,
    shard_bytes: int | None,
    doubtful: Set[tuple[int, int]] = frozenset(),
    check: Callable[[], object] = lambda: None,
) -> tuple[str, list[Written]]:
    """Writes a checkpoint, with links to what the one `before` has already, beside the `revisions` of its step.

    Files are not linked whose device and inode are among the doubtful ones. `check` may raise before all is in place.

    Returns its path, when it is complete and durable. Raises `OSError`, `UnsavableError`; then it is not there.
    """
    revision = max((one.place.revision + 1 for one in revisions), default=0)
    final = os.path.join(directory, name_of(job.step, revision))
    beside = os.path.join(directory, unfinished_name(job.step))
    is_pinned = job.pin or any(one.is_pinned for one in revisions)
    try:
        system.mkdir(beside, _mode(revisions))
        written = {path: _write_entry(beside, path, job, before, shard_bytes, doubtful) for path in job.drafts}
        entries = {path: one.entry for path, one in written.items()}
        text = Record(store, job.step, job.time, job.metrics, entries, serial).text()
        if len(text) > MAX_BYTES:
            raise _unsavable("the values that are no tensors", f"{len(text):,} bytes of them, above {MAX_BYTES:,}")
        if is_pinned:
            with new_file(os.path.join(beside, PIN_FILE)):
                pass
        with new_file(os.path.join(beside, RECORD_FILE)) as output:
            output.append(text)
        sync_directory(beside)
        check()
        system.replace(beside, final)
        try:
            sync_directory(directory)
        except BaseException:
            system.replace(final, beside)
            raise
    except BaseException:
        remove_directory(beside)
        raise
    return final, list(written.values())


def _mode(revisions: list[Found]) -> int:
    """The permission bits of a step's directory: those of the one that it replaces, else those of new directories."""
    newest = max((one.place for one in revisions), default=None)
    with suppress(OSError):
        if newest is not None:
            return os.stat(newest.path).st_mode & 0o777
    return 0o777


def probe(directory: str) -> None:
    """Makes a small directory in the way in which `publish` makes a checkpoint, and removes it. Raises `OSError`."""
    beside, renamed = (os.path.join(directory, unfinished_name(0)) for _ in range(2))
    try:
        system.mkdir(beside)
        with new_file(os.path.join(beside, RECORD_FILE)) as output:
            output.append(b"{}\n")
        sync_directory(beside)
        system.replace(beside, renamed)
        sync_directory(directory)
    finally:
        for path in (beside, renamed):
            remove_directory(path)


def discard(directory: str, gone: Iterable[Place]) -> None:
    """Takes checkpoints away: first their names, durably, so that nobody ever sees half of one. Raises `OSError`."""
    renamed = []
    for place in gone:
        beside = os.path.join(directory, unfinished_name(place.step))
        system.replace(place.path, beside)
        renamed.append(beside)
    if renamed:
        sync_directory(directory)
    for path in renamed:
        remove_directory(path)


def clear(directory: str) -> None:
    """Takes away what saves and prunes have left that did not come to their end, as far as that can be done."""
    with suppress(OSError):
        for path in unfinished(directory):
            remove_directory(path)


def make_directory(path: str) -> None:
    """Makes a directory, and those above it, durably. Raises `OSError`."""
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        make_directory(above)
        with suppress(FileExistsError):
            system.mkdir(path)
        sync_directory(above)


def _write_entry(
    directory: str,
    path: str,
    job: Job,
    before: Found | None,
    shard_bytes: int | None,
    doubtful: Set[tuple[int, int]],
) -> Written:
    made, kind = job.drafts[path], job.kinds[path]
    if not made.tensors and isinstance(made.tree, dict) and set(made.tree) == {"value"}:
        return Written(Entry(kind, value=made.tree["value"]))
    record = before.record if before is not None else None
    old = None if before is None or record is None else before_of(before.place.path, record.entries.get(path), doubtful)
    steady = job.steady.get(path, frozenset())
    with _too_much(path):
        return write_entry(directory, path, kind, made, steady=steady, before=old, shard_bytes=shard_bytes)


@contextmanager
def _too_much(path: str) -> Iterator[None]:
    """Around what raises `ValueError` for more than a header or a manifest holds."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, ModelStateError):
            raise
        raise _unsavable(path, error) from error


def _unsavable(where: str, found: object) -> UnsavableError:
    return UnsavableError(
        "this is more than a checkpoint of a store holds",
        where=where,
        found=found,
        remedy="large values are better kept as tensors or arrays; shard_size_bytes= makes more files",
    )
