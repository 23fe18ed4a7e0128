"""Reads the checkpoints of a store: the first that can be used, what is wrong with one, and which to prune."""

import warnings
from collections.abc import Callable
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
"""Errors of one checkpoint, after which an older one is tried."""


def record_of(entry: StepEntry) -> Record:
    """Returns the record of a checkpoint. Raises the error for which the checkpoint cannot be used."""
    if entry.error is not None:
        raise entry.error
    assert entry.record is not None
    return entry.record


def first_usable(index: StepIndex, step: Step, attempt: Callable[[StepEntry], T]) -> tuple[T, dict[int, str]]:
    """Calls `attempt` with a step, or with the steps from the latest on until one can be used.

    Call it directly from a method of `Store` that `argument_order` wraps: its warnings name the caller of that method.

    Returns:
        The result of `attempt`, and what is wrong with each newer step that was passed over.

    Raises:
        StepNotFoundError: There is no checkpoint, or none can be used.

    Other errors of `attempt` come through.
    """
    while True:
        skipped: dict[int, ModelStateError] = {}
        for entry in index.by_age()[::-1] if step == "latest" else [index.step(step)]:
            try:
                result = attempt(entry)
            except (ModelStateError, OSError) as error:
                if entry.is_gone:
                    break  # it was removed or replaced while it was read: list the store again
                if not isinstance(error, _UNUSABLE):
                    raise
                index.note_damage(entry, error)
                if step != "latest":
                    raise
                skipped[entry.place.step] = error
                continue
            for number, problem in skipped.items():
                # Level 4 is the caller of the store: below it are the check of the arguments, the method, and this.
                warnings.warn(f"step {number} is passed over: {problem}", DamagedCheckpointWarning, stacklevel=4)
            return result, {number: str(problem) for number, problem in skipped.items()}
        else:
            raise StepNotFoundError(
                "no checkpoint of the store can be used" if skipped else "there is no checkpoint in the store",
                where=index.directory,
                found="; ".join(f"step {number}: {problem}" for number, problem in skipped.items()),
                remedy="look at the disk, or at a copy of the store" if skipped else "save one first",
            )


def read_parts(index: StepIndex, entry: StepEntry, verify: bool) -> tuple[Record, dict[str, Part]]:
    """Returns the record and the saved state of each object. Raises the error for which it cannot be used."""
    record, directory = record_of(entry), entry.place.path
    if verify:
        for saved in record.entries.values():
            records.verify(directory, saved)
        index.note_whole(directory)
    parts = {}
    for path, saved in record.entries.items():
        is_module = saved.kind is Kind.MODULE and saved.index
        tree = records.opened(directory, saved) if is_module else records.value_of(directory, saved)
        parts[path] = Part(saved.kind, tree)
    return record, parts


def read_problem(index: StepIndex, entry: StepEntry) -> str | None:
    """Reads all of a checkpoint. Returns what is wrong with it, or empty text; None where it was removed meanwhile."""
    try:
        record_of(entry)
        for saved in read_record(entry.place.path).entries.values():
            records.verify(entry.place.path, saved)
    except (ModelStateError, OSError) as error:
        if entry.is_gone:
            return None
        if isinstance(error, ModelStateError):
            index.note_damage(entry, error)
        return str(error)
    index.note_whole(entry.place.path)
    return ""


def steps_to_prune(index: StepIndex, keep: Keep | None) -> list[StepEntry]:
    """Returns the checkpoints that no rule keeps.

    The newest one that is kept is known to be whole; it is read where it has not been yet. Checkpoints of another
    store, or of a newer version, are never among those to prune.
    """
    bad: set[int] = set()
    while True:
        entries = [entry for entry in index.by_age() if entry.is_whole or entry.is_damaged]
        infos = [replace(entry.info, intact=entry.is_whole and entry.place.step not in bad) for entry in entries]
        kept_steps = kept(infos, keep)
        to_prune = [entry for entry in entries if entry.place.step not in kept_steps]
        if to_prune and keep is not None:
            check_metric(infos, keep)
        intact = [entry for entry, info in zip(entries, infos, strict=True) if info.intact]
        if not to_prune or not intact or index.is_known_whole(intact[-1]) or not read_problem(index, intact[-1]):
            return to_prune
        bad.add(intact[-1].place.step)
