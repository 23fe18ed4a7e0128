"""Reading the checkpoints of a store: the first that can be used, what is wrong with one, and which are to go."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from modelstate.errors import (
    DamagedCheckpointError,
    DamagedCheckpointWarning,
    ForeignCheckpointError,
    ModelStateError,
    NewerManifestError,
    ReadFailedError,
    StepNotFoundError,
)
from modelstate.objects.objects import Kind, Part
from modelstate.store import records
from modelstate.store.records import Record, read_record
from modelstate.store.retention import Keep, check_metric, kept
from modelstate.store.step_index import StepEntry, StepIndex

T = TypeVar("T")
Step = int | Literal["latest"]

_UNUSABLE = (DamagedCheckpointError, ForeignCheckpointError, NewerManifestError, ReadFailedError)
"""What is wrong with a checkpoint, so that another one is taken."""


def usable(found: StepEntry) -> Record:
    """What it says of itself. Raises what keeps it from being used."""
    if found.error is not None:
        raise found.error
    assert found.record is not None
    return found.record


def of_first_whole(shelf: StepIndex, step: Step, attempt: Callable[[StepEntry], T]) -> tuple[T, dict[int, str]]:
    """What the attempt makes of the step, or of the latest one that can be used; and newer ones that cannot."""
    while True:
        skipped: dict[int, ModelStateError] = {}
        for found in shelf.by_age()[::-1] if step == "latest" else [shelf.step(step)]:
            try:
                result = attempt(found)
            except (ModelStateError, OSError) as error:
                if found.is_gone:
                    break  # taken away, or replaced, while it was read: there are others now
                if not isinstance(error, _UNUSABLE):
                    raise
                shelf.note_damage(found, error)
                if step != "latest":
                    raise
                skipped[found.place.step] = error
                continue
            _warn(skipped)
            return result, {number: str(error) for number, error in skipped.items()}
        else:
            raise StepNotFoundError(
                "no checkpoint of the store can be used" if skipped else "there is no checkpoint in the store",
                where=shelf.directory,
                found="; ".join(f"step {number}: {error}" for number, error in skipped.items()),
                remedy="look at the disk, or at a copy of the store" if skipped else "save one first",
            )


def parts_of(shelf: StepIndex, found: StepEntry, verify: bool) -> tuple[Record, dict[str, Part]]:
    """What was captured of each object. Raises what keeps the checkpoint from being used."""
    record, directory = usable(found), found.place.path
    if verify:
        for entry in record.entries.values():
            records.verify(directory, entry)
        shelf.note_whole(directory)
    parts = {}
    for path, entry in record.entries.items():
        is_module = entry.kind is Kind.MODULE and entry.index
        tree = records.opened(directory, entry) if is_module else records.value_of(directory, entry)
        parts[path] = Part(entry.kind, tree)
    return record, parts


def problem_of(shelf: StepIndex, found: StepEntry) -> str | None:
    """What reading all of it shows to be wrong, empty where nothing is; None where it is taken away meanwhile."""
    try:
        usable(found)
        for entry in read_record(found.place.path).entries.values():
            records.verify(found.place.path, entry)
    except (ModelStateError, OSError) as error:
        if found.is_gone:
            return None
        if isinstance(error, ModelStateError):
            shelf.note_damage(found, error)
        return str(error)
    shelf.note_whole(found.place.path)
    return ""


def to_go(shelf: StepIndex, keep: Keep | None) -> list[StepEntry]:
    """What no rule keeps. The newest one that is kept has been found to be whole, by reading it if need be.

    What is another store's, or a newer version's, is not ours to take away.
    """
    bad: set[int] = set()
    while True:
        ours = [found for found in shelf.by_age() if found.is_whole or found.is_damaged]
        infos = [replace(found.info, intact=found.is_whole and found.place.step not in bad) for found in ours]
        stay = kept(infos, keep)
        gone = [found for found in ours if found.place.step not in stay]
        if gone and keep is not None:
            check_metric(infos, keep)
        intact = [found for found, info in zip(ours, infos, strict=True) if info.intact]
        if not gone or not intact or shelf.is_known_whole(intact[-1]) or not problem_of(shelf, intact[-1]):
            return gone
        bad.add(intact[-1].place.step)


def _warn(skipped: Mapping[int, ModelStateError]) -> None:
    for step, error in skipped.items():
        # At the caller of the store: above are `of_first_whole`, the store's method, and what checks its arguments.
        warnings.warn(f"step {step} is passed over: {error}", DamagedCheckpointWarning, stacklevel=5)
