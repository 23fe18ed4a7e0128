"""The checkpoints of a store, and their list.

Reading needs no lock: a checkpoint may be replaced or removed at any time, and the store is listed again then.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from modelstate.arguments import invalid_option
from modelstate.errors import (
    DamagedCheckpointError,
    DamagedCheckpointWarning,
    DistributedError,
    LockedError,
    ModelStateError,
    NewerManifestError,
    OpenError,
    ReadFailedError,
    SourceNotFoundError,
    StepNotFoundError,
    StoreMovedError,
)
from modelstate.formats.manifest import OPEN_SEAL, SEAL, sealed
from modelstate.formats.sharded import INDEX_SUFFIX
from modelstate.io.atomic import write_error
from modelstate.io.engine import for_each
from modelstate.io.files import read_failed
from modelstate.io.lock import check_directory
from modelstate.objects.parts import Kind, Part
from modelstate.process import progress_bar
from modelstate.remote.location import is_remote
from modelstate.store.backend import STORE_FILE, LocalBackend, Place
from modelstate.store.record import ALL, FileRecord, Record, damaged, read_record, read_sealed, unreadable
from modelstate.store.retention import CheckpointInfo, Keep, check_metric, kept
from modelstate.text_format import in_a_line, short_repr

if TYPE_CHECKING:
    from modelstate.checkpoint.checkpoint import Checkpoint
    from modelstate.distributed.agreement import Agreement, Digest  # imports torch
    from modelstate.remote.cache import Cache
    from modelstate.store.bucket import Bucket

STORE_FORMAT = 1
"""The version of a store as a whole. A writer refuses a newer one."""
READS_AT_ONCE = 16
_MAX_STORE_FILE_BYTES = 10_000
_UNUSABLE = (DamagedCheckpointError, NewerManifestError, ReadFailedError)
"""Errors of one checkpoint, after which an older one is tried."""
_PROBLEMS: Mapping[type, str] = {ReadFailedError: "not readable", NewerManifestError: "newer version"}
_CHECK_PATH = "check the path of the store; in a new run, save a checkpoint first"
Step = int | Literal["latest"]
_Result = TypeVar("_Result")
_Key = tuple[str, object]
"""The path of a checkpoint, and what identifies its files, which may be replaced or repaired: None for no files."""


class Examined(NamedTuple):
    """What is known of a checkpoint."""

    record: Record | None
    """None where it cannot be read."""
    error: ModelStateError | None
    """Why the checkpoint cannot be used, as far as names, sizes and earlier reads show."""
    problem: str
    """The same, as in `CheckpointInfo`."""


class StepEntry:
    """A checkpoint, as it was when the store was listed. Its record is read when it is needed, once."""

    __slots__ = ("_examined", "_identity", "_index", "_store", "place")

    def __init__(self, place: Place, index: StepIndex, store: Callable[[], str] | None) -> None:
        """Takes what returns the name of the store; None where the checkpoint is known to be of it."""
        self.place, self._index, self._store = place, index, store
        self._identity = index.backend.identity(place.path)  # before the record is read
        self._examined: Examined | None = None
        if not index.backend.is_lazy:
            self.read()

    def read(self) -> Examined:
        """Reads the record, unless that is done. Returns what is known of the checkpoint."""
        if self._examined is None:
            self._examined = self._index.examined(self.place, self._store)
        return self._examined

    def file_names(self) -> set[str] | None:
        """Returns the names of its files; None where its record cannot be read."""
        record = self.read().record
        return None if record is None else {*record.files}

    @property
    def serial(self) -> int | None:
        """The number of the save; None where it is not known."""
        if self._index.backend.is_lazy:
            return self.place.revision
        return None if (record := self.read().record) is None else record.serial

    @property
    def usable_record(self) -> Record:
        """The record. Raises the error for which the checkpoint cannot be used."""
        record, error, _ = self.read()
        if error is not None:
            raise error
        assert record is not None
        return record

    @property
    def is_whole(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return self._examined is None or self._examined.error is None

    @property
    def is_damaged(self) -> bool:
        """Whether it is of this store and not what was saved. Others that cannot be used now stay."""
        return self.read().problem == "damaged"

    @property
    def is_gone(self) -> bool:
        """Whether it was removed or replaced since the directory was listed."""
        backend, path = self._index.backend, self.place.path
        return backend.is_gone(path) or backend.identity(path) != self._identity

    def open_object(self, name: str, *, verify: bool = False, share: slice = ALL) -> Checkpoint:
        """Opens one object, with `verify` after it, or a share of its tensors, was read and compared with its digests.

        Raises `StepNotFoundError` where there is no such object with tensors, and the error for which the checkpoint
        cannot be used.
        """
        entries = self.usable_record.entries
        saved = entries.get(name)
        if saved is None or not saved.index:
            raise StepNotFoundError(
                "there is no such object with tensors in the checkpoint",
                where=self.place.path,
                expected=", ".join(path for path, other in entries.items() if other.index) or "none has any",
                found=short_repr(name),
                remedy="give the name of one of these objects",
            )
        checkpoint = saved.open(self.place.files, self._index.cache, verify=verify, share=share)
        checkpoint.step = self.place.step
        return checkpoint

    @property
    def is_pinned(self) -> bool:
        return self._index.backend.is_pinned(self.place)

    @property
    def info(self) -> CheckpointInfo:
        """The public description of the checkpoint."""
        step, path, pinned = self.place.step, self.place.path, self.is_pinned
        record, _, problem = self.read()
        if record is None:
            seconds = 0.0
            with suppress(OSError):
                seconds = os.stat(path).st_mtime
            return CheckpointInfo(step, seconds, pinned=pinned, problem=problem, path=path)
        return CheckpointInfo(
            step,
            record.time,
            record.metrics,
            pinned,
            problem,
            nbytes=record.nbytes,
            path=path,
            serial=record.serial,
            store=record.store,
            written_bytes=record.written_bytes,
            patches=max((entry.patches for entry in record.entries.values()), default=0),
        )


def ages(serials: Mapping[int, int | None]) -> dict[int, tuple[int, int]]:
    """Returns a sort key for each step by the time of saving: the higher, the later.

    `serials` has None for a checkpoint that cannot be used, since its own serial may be wrong: it follows the step
    before it.
    """
    keys, last = {}, 0
    for step in sorted(serials):
        serial = serials[step]
        last = last if serial is None else serial
        keys[step] = last, step
    return keys


class StepIndex:
    """The checkpoints in a directory.

    Every call lists the directory anew. Only the results of reading whole checkpoints are kept in memory: which of
    them are damaged, and which are not.
    """

    def __init__(self, directory: str, cache: Cache | None = None) -> None:
        self.directory, self.cache = directory, cache
        self.backend: LocalBackend | Bucket
        if is_remote(directory):
            from modelstate.store.bucket import Bucket  # a save in a directory needs no client

            self.backend = Bucket(directory)
        else:
            self.backend = LocalBackend(directory)
        self._known: dict[_Key, ModelStateError | None] = {}
        """Checkpoints that this object has read or written: the damage that only reading shows, or None."""
        self._doubtful: set[str] = set()
        """The names of the files of damaged checkpoints. A link of another checkpoint has the same name."""
        self._records: dict[str, Record] = {}
        """Records of a bucket, whose objects do not change, by the path of the checkpoint."""

    # Listing.

    def all_revisions(self, store: str = "") -> list[StepEntry]:
        """Returns every revision of every step, in order. Raises `ReadFailedError`.

        `store` is the name of the store, where that is known.
        """
        while True:
            places = self.places()
            self._records = {place.path: self._records[place.path] for place in places if place.path in self._records}
            name = cache(partial(self._name, places, store))
            entries = [StepEntry(place, self, name) for place in places]
            # A checkpoint that was removed meanwhile may have been replaced by one that is not on this list.
            if not any(not entry.is_whole and entry.is_gone for entry in entries):
                return entries

    def read_all(self, entries: Iterable[StepEntry] | None = None) -> list[StepEntry]:
        """Returns checkpoints, or else every revision, with their records read; those of a bucket several at a time."""
        listed = self.all_revisions() if entries is None else list(entries)
        for_each(listed, [StepEntry.read] * min(READS_AT_ONCE, len(listed)))
        return listed

    def steps(self, revisions: Iterable[StepEntry] | None = None) -> list[StepEntry]:
        """Returns, for every step, the newest revision that is whole, or else the newest; in the order of the steps.

        They are those of `revisions`, or else of a new list of the directory.
        """
        best: dict[int, StepEntry] = {}
        for entry in self.all_revisions() if revisions is None else revisions:
            other = best.get(entry.place.step)
            if other is None or entry.is_whole or not other.is_whole:
                best[entry.place.step] = entry
        return [best[step] for step in sorted(best)]

    def by_age(self, revisions: Iterable[StepEntry] | None = None) -> list[StepEntry]:
        """Returns `steps` in the order of saving; one that cannot be used follows the step before it."""
        entries = self.steps(revisions)
        order = ages({entry.place.step: entry.serial if entry.is_whole else None for entry in entries})
        return sorted(entries, key=lambda entry: order[entry.place.step])

    def step(self, step: object, revisions: Iterable[StepEntry] | None = None) -> StepEntry:
        """Returns one step, as `steps` does. Raises `StepNotFoundError`, and `OptionError` for another type."""
        if type(step) is not int:
            raise invalid_option("step", "must be an integer >= 0", step, expected="an int")
        entries = self.steps(revisions)
        for entry in entries:
            if entry.place.step == step:
                return entry
        raise StepNotFoundError(
            "there is no checkpoint of this step",
            where=self.directory,
            expected=", ".join(str(entry.place.step) for entry in entries[-20:]) or "none is there",
            found=step if entries else f"{step}, and {self._emptiness()}",
            remedy="give one of the steps that are there" if entries else _CHECK_PATH,
        )

    def _emptiness(self) -> str:
        """What is at the path of a store without checkpoints, for an error."""
        is_there = is_remote(self.directory) or os.path.isdir(self.directory)
        return "a store without checkpoints" if is_there else "no such directory"

    def saves(self, step: object = "latest") -> list[StepEntry]:
        """Returns the saves of a step, or those of all steps from the latest on.

        A step has its last save first, and then the earlier ones that a killed process had no time to remove. Raises
        as `step`.
        """
        revisions = self.all_revisions()
        of_steps: dict[int, list[StepEntry]] = {}
        for entry in reversed(revisions):
            of_steps.setdefault(entry.place.step, []).append(entry)
        found: list[StepEntry] = []
        for chosen in self.by_age(revisions)[::-1] if step == "latest" else [self.step(step, revisions)]:
            of_step = of_steps[chosen.place.step]
            found += [entry for entry in of_step if entry is chosen or entry.read().problem != "other store"]
        return found

    def places(self) -> list[Place]:
        try:
            return self.backend.places()
        except FileNotFoundError:
            return []
        except OSError as error:
            if isinstance(error, ModelStateError):  # of a bucket
                raise read_failed(error.what, self.directory, error, error.remedy) from error
            ask = "ask the owner of the directory for the permissions to list and to search it"
            remedies = [ask] if isinstance(error, PermissionError) else []
            raise read_failed("the store cannot be read", self.directory, error, *remedies) from error

    def _name(self, places: Iterable[Place], store: str) -> str:
        """Returns the name of the store, where it is not known, or else the one that most of the checkpoints have."""
        try:
            return store or read_name(self.directory)
        except (OpenError, ReadFailedError, DamagedCheckpointError):
            return self._most_common_name(places)

    def _most_common_name(self, places: Iterable[Place]) -> str:
        """Returns the name that most of the checkpoints have, for a store whose `store.json` is lost or damaged."""
        names: Counter[str] = Counter()
        for place in places:
            with suppress(ModelStateError):
                names[self._record(place).store] += 1
        return names.most_common(1)[0][0] if names else ""

    def _record(self, place: Place) -> Record:
        record = self._records.get(place.path)
        if record is None:
            record = read_record(place.path)
            if self.backend.is_lazy:
                self._records[place.path] = record
        return record

    def examined(self, place: Place, store: Callable[[], str] | None) -> Examined:
        """Returns what is known of a checkpoint.

        Args:
            place: where the checkpoint is.
            store: returns the name of the store; None where the checkpoint is known to be of it.
        """
        record: Record | None = None
        try:
            record = self._record(place)
            name = record.store if store is None else store()
            if record.step != place.step or record.store != name:
                foreign = DamagedCheckpointError(
                    "the checkpoint was put here from another store, or under another step",
                    where=place.path,
                    expected=f"step {place.step} of the store {name}",
                    found=f"step {record.step} of the store {record.store}",
                    remedy="open the store that it is from; ms.open reads what is in it by itself",
                )
                return Examined(record, foreign, "other store")
            if problem := self.backend.problem_of(place, record.files):
                raise damaged(place.path, problem)
            known = self._known.get(self._key(place.path)) if any(self._known.values()) else None
            return Examined(record, known, "" if known is None else "damaged")
        except (ModelStateError, OSError) as error:
            reason = error if isinstance(error, ModelStateError) else unreadable(place.path, error)
            return Examined(record, reason, _PROBLEMS.get(type(reason), "damaged"))

    # Reading whole checkpoints.

    def first_usable(
        self,
        step: Step,
        attempt: Callable[[StepEntry], _Result],
        agreement: Agreement | None = None,
        *,
        warns: bool = True,
    ) -> tuple[_Result, dict[int, str]]:
        """Calls `attempt` with a step, or with the steps from the latest on until one can be used.

        Of several ranks the first one lists the steps, and all of them attempt the same ones.

        A save of a step that cannot be used is passed over for an earlier save of the same step, where there is one.

        Args:
            step: the step, or "latest".
            attempt: uses a save; raises the error for which it cannot be used.
            agreement: the ranks; None for this process alone.
            warns: whether each newer save that was passed over is a warning.

        Returns:
            The result of `attempt`, and what is wrong with the newer saves that were passed over, by their step.

        Raises:
            StepNotFoundError: There is no checkpoint, or none can be used.

        Other errors of `attempt` come through, with a note for each step that was passed over.
        """
        while True:
            skipped: dict[int, ModelStateError] = {}
            for entry in self._candidates(step, agreement):
                try:
                    result = attempt(entry)
                except (ModelStateError, OSError) as error:
                    if not isinstance(error, _UNUSABLE):
                        for text in _passed_over(skipped, entry).values():
                            error.add_note(text)
                        if agreement is not None and agreement.is_collective:
                            raise  # only an error of one checkpoint is sure to be on all ranks, in the same class
                    if _decided(agreement, "looking for the step", partial(getattr, entry, "is_gone")):
                        break  # it was removed or replaced while it was read: list the store again
                    if not isinstance(error, _UNUSABLE):
                        raise
                    self._note_damage(entry, error)
                    skipped.setdefault(entry.place.step, error)
                    continue
                problems = _passed_over(skipped, entry)
                for text in problems.values() if warns else ():
                    warn_caller(text, DamagedCheckpointWarning)
                return result, problems
            else:
                if step != "latest":
                    problem = skipped[step]
                    with suppress(ModelStateError):
                        others = [entry.place.step for entry in self.by_age() if entry.is_whole]
                        if isinstance(problem, DamagedCheckpointError) and others[-1:] not in ([], [step]):
                            named = f"another step, such as {others[-1]}"
                            problem.remedy = re.sub("another step(?!,)", named, problem.remedy)  # unless it has one
                    raise problem
                raise StepNotFoundError(
                    "no checkpoint of the store can be used" if skipped else "there is no checkpoint in the store",
                    where=self.directory,
                    found="; ".join(f"step {number}: {in_a_line(str(problem))}" for number, problem in skipped.items())
                    or self._emptiness(),
                    remedy="look at the disk, or at a copy of the store" if skipped else _CHECK_PATH,
                )

    def _candidates(self, step: Step, agreement: Agreement | None) -> Iterator[StepEntry]:
        """Yields `saves`; of several ranks, those that the first one has listed."""
        listed: list[StepEntry] = []

        def choose() -> list[tuple[int, int, str, str]]:
            listed.extend(self.saves(step))
            places, root = [entry.place for entry in listed], len(self.directory)
            return [(place.step, place.revision, place.path[root:], place.files[root:]) for place in places]

        chosen = _decided(agreement, "choosing the step", choose)
        yield from listed
        for number, revision, path, files in () if listed else chosen:
            yield StepEntry(Place(number, revision, self.directory + path, self.directory + files), self, None)

    def opened(
        self, entry: StepEntry, verify: bool, agreement: Agreement, progress: bool | None
    ) -> tuple[Record, dict[str, Part]]:
        """Returns the record of a checkpoint and the saved state of each object, on all ranks or on none.

        Args:
            entry: the checkpoint.
            verify: whether its bytes are compared with their digests. Ranks that see the same files compare a share of
                them each.
            agreement: the ranks.
            progress: whether the verification on one rank shows a progress bar, as in `modelstate.verify`.

        Raises `DistributedError` where the ranks see different checkpoints, and the error for which the checkpoint
        cannot be used.
        """
        place, number = entry.place, entry.place.step

        def digests() -> list[Digest]:
            from modelstate.distributed.agreement import Digest

            record = entry.usable_record
            text = f"{place.path}, save {record.serial} of the store {record.store}"
            return [Digest.of("the checkpoints", text, [record.text()])]

        with agreement.phase(f"opening step {number}", digests):
            if not agreement.is_first and entry.is_gone:
                chosen = f"{os.path.basename(place.path)}, which the first rank has chosen"
                raise not_shared(self.directory, chosen, "no such directory")
            record = entry.usable_record
            identity = self.backend.identity(place.path)
        files = agreement.texts("comparing files", f"{identity}")
        share = slice(agreement.position, None, len(files)) if len(set(files)) == 1 else ALL
        shows_progress = progress if verify and not agreement.is_collective else False
        parts = {}
        with (
            agreement.phase(f"verifying step {number}" if verify else f"opening the objects of step {number}"),
            progress_bar(shows_progress, record.nbytes, "verifying") as advance,
        ):
            for path, saved in record.entries.items():
                opened: Checkpoint | None = None
                if saved.index:
                    opened = saved.open(place.files, self.cache, verify=verify, share=share, on_read=advance)
                tree: object = opened
                if saved.kind is not Kind.MODULE or opened is None:
                    # Each of several ranks takes only its part of the tensors.
                    may_map = agreement.is_collective and saved.kind is Kind.OPTIMIZER
                    tree = saved.decode(place.files, opened=opened, map=may_map)
                if saved.ranks and not (isinstance(tree, list) and len(tree) == saved.ranks):
                    raise damaged(place.files, f"{path}: not the states of {saved.ranks} ranks")
                parts[path] = Part(saved.kind, tree, saved.ranks)
            if verify:
                self.note_whole(place.path)
        return record, parts

    def whole(self, entry: StepEntry, progress: bool | None = False) -> StepEntry:
        """Reads all of a checkpoint, and returns it. Raises the error for which it cannot be used.

        `progress` says whether a progress bar is shown, as in `modelstate.verify`. Raises `StepNotFoundError` where the
        checkpoint was removed or replaced meanwhile.
        """
        try:
            nbytes = entry.usable_record.nbytes
            with progress_bar(progress, nbytes, f"step {entry.place.step}") as advance:
                for saved in read_record(entry.place.path).entries.values():
                    if saved.index:  # else the state is in the record, which is sealed
                        saved.open(entry.place.files, self.cache, verify=True, on_read=advance)
        except (ModelStateError, OSError) as error:
            if entry.is_gone:
                raise StepNotFoundError(
                    "the checkpoint was removed or replaced while it was read", where=entry.place.path
                ) from error
            if not isinstance(error, ModelStateError):
                raise unreadable(entry.place.path, error) from error
            self._note_damage(entry, error)
            raise
        self.note_whole(entry.place.path)
        return entry

    def problem_of(self, entry: StepEntry, progress: bool | None = False) -> str:
        """Returns what is wrong with a checkpoint, as `whole` finds it. Raises `StepNotFoundError`."""
        try:
            self.whole(entry, progress)
        except StepNotFoundError:
            raise
        except ModelStateError as error:
            return str(error)
        return ""

    def steps_to_prune(self, keep: Keep | None) -> list[int]:
        """Returns the steps that no rule keeps.

        The newest one that is kept is known to be whole; it is read where it has not been yet. Checkpoints of another
        store or of a newer version, and those that cannot be read now, are never among those to prune.
        """
        if keep is None:
            return []
        not_readable: set[int] = set()
        while True:
            listed = self.read_all(self.by_age())
            readable = (entry for entry in listed if entry.place.step not in not_readable)
            entries = [entry for entry in readable if entry.is_damaged or entry.is_whole]
            infos = [entry.info for entry in entries]
            kept_steps = kept(infos, keep)
            to_prune = [info.step for info in infos if info.step not in kept_steps]
            if to_prune:
                check_metric(infos, keep)
            newest = next((entry for entry in reversed(entries) if entry.is_whole), None)
            if not to_prune or newest is None or self._key(newest.place.path) in self._known:
                return to_prune
            with suppress(StepNotFoundError):  # it was replaced or removed while it was read
                if not self.problem_of(newest):
                    return to_prune
                if self._key(newest.place.path) not in self._known:
                    not_readable.add(newest.place.step)

    def prune(self, keep: Keep | None) -> tuple[int, ...]:
        """Removes the steps that no rule keeps, and returns them. Raises `OSError`.

        All revisions of such a step are removed that are whole or damaged.
        """
        steps = self.steps_to_prune(keep)
        if steps:
            revisions = self.all_revisions()
            own = (entry for entry in revisions if entry.is_whole or entry.is_damaged)
            self.discard([entry for entry in own if entry.place.step in steps], revisions)
        return tuple(steps)

    def discard(self, removed: Sequence[StepEntry], revisions: Sequence[StepEntry] | None = None) -> None:
        """Removes checkpoints, of a list of every revision or of a new one. Raises `OSError`."""
        places = [entry.place for entry in removed]
        names = {name for entry in removed for name in entry.file_names() or ()}
        self.backend.discard(places, names, lambda: self.file_names({place.path for place in places}, revisions))

    def file_names(
        self, without: Set[str] = frozenset(), revisions: Sequence[StepEntry] | None = None
    ) -> set[str] | None:
        """Returns the names of the files of all checkpoints, but for those at some paths.

        None stands for a record that cannot be read, which may name any file.
        """
        names: set[str] = set()
        for entry in self.read_all(revisions):
            if entry.place.path not in without:
                of_entry = entry.file_names()
                if of_entry is None:
                    return None
                names |= of_entry
        return names

    def untouched_head(self, path: str, record: FileRecord) -> bytes | None:
        """Returns the head of a file that can be linked; None where it has changed, or a damaged checkpoint has it."""
        if os.path.basename(path) not in self._doubtful and self.backend.is_untouched(path, record):
            with suppress(OSError, OpenError):
                return record.read_head(path)
        return None

    def note_whole(self, path: str) -> None:
        """Counts a checkpoint as whole, so that it need not be read again before others are pruned."""
        self._note(path, None)

    def _note_damage(self, entry: StepEntry, error: ModelStateError) -> None:
        """Counts a checkpoint as damaged until one of its files changes."""
        if isinstance(error, DamagedCheckpointError):
            self._note(entry.place.path, error)
            self._doubtful |= {name for name in entry.file_names() or () if not name.endswith(INDEX_SUFFIX)}

    def _note(self, path: str, error: ModelStateError | None) -> None:
        key = self._key(path)
        if key[1] is not None:  # otherwise nothing shows that the files have changed
            self._known[key] = error

    def _key(self, path: str) -> _Key:
        return path, self.backend.contents(path)

    # The name of the store, which each of its checkpoints has too.

    def ensure_name(self) -> str:
        """Returns the name of the store, and writes `store.json` where it is missing or damaged.

        Raises `NewerManifestError`, the errors of a write, and `OpenError` or `ReadFailedError` where `store.json`
        exists and cannot be read: it may have the name, and with another name all checkpoints would be foreign.
        """
        try:
            return read_name(self.directory)
        except (SourceNotFoundError, DamagedCheckpointError):
            name = self._most_common_name(self.places()) or os.urandom(8).hex()
        text = json.dumps({SEAL: OPEN_SEAL, "format": STORE_FORMAT, "store": name}).encode() + b"\n"
        self.backend.write_name(sealed(text))
        return name


class WriteAccess:
    """The right to change a store, of one process at a time, and of one thread of it.

    Args:
        index: the checkpoints of the store.
    """

    def __init__(self, index: StepIndex) -> None:
        self._index, self.lock = index, index.backend.lock
        self._in_use: os.stat_result | None = None
        """The directory of the last restore or save, which no other directory may replace."""
        self._pid, self._thread_lock = os.getpid(), threading.RLock()
        self._writing_thread: int | None = None

    @contextmanager
    def exclusive(self, wait: bool = True) -> Iterator[bool]:
        """Keeps other threads from saving and pruning. Yields False where `wait` is false and another thread does."""
        if self._pid != os.getpid():  # a forked child lacks the thread that may hold the lock
            self._pid, self._thread_lock, self._writing_thread = os.getpid(), threading.RLock(), None
        if self._writing_thread == threading.get_ident():  # a signal handler runs in the thread that it interrupts
            raise LockedError(
                "a save in this thread has been interrupted by another one, as by a signal's handler",
                where=self._index.directory,
                remedy="have the handler set a flag, and the loop save: see modelstate.Deadline",
            )
        if not self._thread_lock.acquire(blocking=wait):
            yield False
            return
        try:
            self._writing_thread = threading.get_ident()
            yield True
        finally:
            self._writing_thread = None
            self._thread_lock.release()

    def acquire(self) -> str:
        """Creates the directory and locks it for this process, unless that is done. Returns the name of the store."""
        index = self._index
        with self.errors():
            if self.lock.held:
                try:
                    self.lock.confirm()
                    return index.ensure_name()
                except LockedError:
                    # The lock file was replaced. The lock is acquired again, unless another process has it.
                    self.lock.release()
            if self._in_use is not None:
                check_directory(index.directory, self._in_use)
            index.backend.make()
            try:
                self.lock.acquire()
            except LockedError as error:
                dist = sys.modules.get("torch.distributed")
                if dist is not None and dist.is_available() and dist.is_initialized():
                    error.remedy = (
                        "if the other writer is a rank of this run: Store(process_group=) for a save on all ranks, and "
                        f"prune(), pin() and unpin() on the first rank only; {error.remedy}"
                    )
                raise
            try:
                # Before anything is removed: a store of a newer version is refused here.
                store = index.ensure_name()
                self.note_directory()
                index.backend.clear(index.file_names)
                return store
            except BaseException:
                self.lock.release()
                raise

    def note_directory(self) -> None:
        """Notes which directory is in use, until `release`. Raises `OSError`."""
        directory = self._index.directory
        self._in_use = None if is_remote(directory) else os.stat(directory)

    @contextmanager
    def errors(self, *name: str) -> Iterator[None]:
        """Raises `WriteFailedError` in place of an I/O error, or `StoreMovedError` where the directory was moved.

        `name` is the file or the directory, in that of the store, that is written; without it, the store is.
        """
        try:
            yield
        except OSError as error:
            try:
                self.lock.check_directory()
            except StoreMovedError as moved:
                raise moved from error
            if isinstance(error, ModelStateError):
                raise
            raise write_error(os.path.join(self._index.directory, *name), error) from error

    def release(self) -> None:
        """Unlocks the store for other processes."""
        self.lock.release()
        self._in_use = None


def read_name(directory: str) -> str:
    """Returns the name in `store.json`.

    Raises `OpenError` and `ReadFailedError` where the file cannot be read, `NewerManifestError`, and
    `DamagedCheckpointError` where its content is not what was written.
    """
    path = os.path.join(directory, STORE_FILE)
    try:
        name = read_sealed(path, _MAX_STORE_FILE_BYTES, STORE_FORMAT).get("store")
        if type(name) is not str or not name:
            raise ValueError(f"a name {name!r:.80}")
    except (OpenError, ReadFailedError):
        raise
    except ValueError as error:
        raise DamagedCheckpointError(
            "the file that has the store's name is damaged",
            where=path,
            found=error,
            remedy="the checkpoints can be used: they have the name too, and the next save writes the file again",
        ) from error
    return name


def store_file_problem(directory: str) -> str:
    """Returns what is wrong with `store.json`; empty where nothing is, and where the directory has no such file."""
    try:
        read_name(directory)
    except NewerManifestError:
        return ""
    except SourceNotFoundError as error:  # also for a symbolic link to a file that does not exist
        return str(error) if os.path.lexists(os.path.join(directory, STORE_FILE)) else ""
    except (OpenError, ReadFailedError, DamagedCheckpointError) as error:
        return str(error)
    return ""


def not_shared(directory: str, expected: str, found: object) -> DistributedError:
    """Returns the error for ranks whose paths of the store lead to different directories."""
    return DistributedError(
        "the ranks do not see the same store; nothing has been changed",
        where=directory,
        expected=expected,
        found=found,
        remedy="give all ranks the path of one directory, on a file system that they share",
    )


def _decided(agreement: Agreement | None, name: str, choose: Callable[[], _Result]) -> _Result:
    """Returns what the first rank chooses, or this process where it is alone."""
    return choose() if agreement is None else agreement.decided(name, choose)


def _passed_over(skipped: Mapping[int, ModelStateError], entry: StepEntry) -> dict[int, str]:
    """Returns a sentence for each step whose last save could not be used before this entry, by the step."""
    last_save = {entry.place.step: "the last save of "}
    return {number: f"{last_save.get(number, '')}step {number} is passed over: {skipped[number]}" for number in skipped}


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warns, in the name of the code that called the package."""
    frame, level = sys._getframe(), 1
    while frame.f_globals.get("__name__", "").startswith("modelstate.") and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
