"""`modelstate.Store`."""

import atexit
import json
import os
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, Self, overload

import torch

from modelstate.errors import (
    DamagedCheckpointError,
    DamagedCheckpointWarning,
    ForeignCheckpointError,
    ModelStateError,
    NewerManifestError,
    OptionError,
    ReadFailedError,
    SaveTargetError,
    StepExistsError,
    StepNotFoundError,
    UnsavableError,
)
from modelstate.read.checkpoint import Checkpoint
from modelstate.read.paths import local_path
from modelstate.store import contents
from modelstate.store.entries import Written, before_of, remove_directory, write_entry
from modelstate.store.layout import (
    PIN_FILE,
    RECORD_FILE,
    STORE_FILE,
    Place,
    name_of,
    places,
    unfinished,
    unfinished_name,
)
from modelstate.store.lock import WriterLock
from modelstate.store.objects import MODULE, Part, captured, targets_of
from modelstate.store.record import Entry, Record, damaged, read_record
from modelstate.store.restoring import Restored, RulesOf, restore_objects
from modelstate.store.retention import CheckpointInfo, Keep, as_keep, kept
from modelstate.store.saving import PendingSave, SavedStep
from modelstate.store.staging import Staging
from modelstate.write import system
from modelstate.write.atomic import atomic_file
from modelstate.write.draft import Draft, draft
from modelstate.write.files import new_file, sync_directory, write_errors

Step = int | Literal["latest"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RestoredStep(Restored):
    """What came back, and of which step. A mapping from names to the plain values that were asked for."""

    step: int
    time: float
    """Seconds since 1970, when it was saved."""
    metrics: Mapping[str, float]
    skipped: Mapping[int, str]
    """Newer steps that are damaged, with what is wrong with each."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint in the directory."""

    place: Place
    record: Record | None
    """None where it cannot be read."""
    problem: str
    """What is wrong with it, as far as names and sizes say; empty where nothing is."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A checkpoint that is about to be written."""

    step: int
    kinds: Mapping[str, str]
    drafts: Mapping[str, Draft]
    steady: Mapping[str, frozenset[str]]
    metrics: Mapping[str, float]
    pin: bool
    begun: float
    time: float


class Store:
    """Checkpoints of a training run in a directory: each is there in full and durable, or not at all.

    Nothing is written before the first `save`, which also takes the store for this process: another one that saves is
    refused until this one closes the store or ends, however it does. Reading needs no lock. Whatever a killed process
    has left behind is taken away by the next one that writes.

    Args:
        directory: where it is, or is going to be.
        keep: which checkpoints stay when another one has been saved: a `Keep`, or the number of the last ones; None
            keeps all.
        shard_size_bytes: the most bytes of tensors in one file; None has one file for what an object has.

    Raises `SaveTargetError` for what can be no directory, and `OptionError`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: Keep | int | None = None,
        shard_size_bytes: int | None = None,
    ) -> None:
        self.directory = _directory(directory)
        self.keep = as_keep(keep)
        if shard_size_bytes is not None and (type(shard_size_bytes) is not int or shard_size_bytes < 1):
            raise OptionError("shard_size_bytes= is a number of bytes", expected="1 or more", found=shard_size_bytes)
        self._shard_bytes = shard_size_bytes
        self._lock = WriterLock(self.directory)
        self._is_writer = False
        self._staging = Staging()
        self._pending: PendingSave | None = None
        _stores.add(self)

    def __repr__(self) -> str:
        return f"<Store {self.directory!r}>"

    # Saving.

    @overload
    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        block: Literal[True] = True,
        metrics: Mapping[str, float] | None = ...,
        pin: bool = ...,
        overwrite: bool = ...,
        when_busy: Literal["wait", "skip"] = ...,
    ) -> SavedStep: ...
    @overload
    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        block: Literal[False],
        metrics: Mapping[str, float] | None = ...,
        pin: bool = ...,
        overwrite: bool = ...,
        when_busy: Literal["wait", "skip"] = ...,
    ) -> PendingSave | None: ...
    def save(
        self,
        step: int,
        objects: Mapping[str, Any],
        *,
        block: bool = True,
        metrics: Mapping[str, float] | None = None,
        pin: bool = False,
        overwrite: bool = False,
        when_busy: Literal["wait", "skip"] = "wait",
    ) -> SavedStep | PendingSave | None:
        """Saves the state of several objects as a checkpoint, which is visible when it is complete and durable.

        Tensors that have not changed since the checkpoint before are not written again.

        Args:
            step: its number, 0 or more.
            objects: modules, optimizers, anything with `state_dict` and `load_state_dict`, `torch.Generator`s and plain
                values, under names; nested mappings are possible. The modules of the optimizers have to be among them.
            block: whether to return when it is durable; else when the state has been copied to memory that is used
                again by the next save. Then a thread writes, and a `PendingSave` comes back. What it raises comes
                through at its `result`, at `wait`, or at the next save; the process waits for it before it ends.
            metrics: numbers that say how good it is, for `Keep(best=...)`.
            pin: keeps it whatever `keep` says, until `unpin`.
            overwrite: replaces a step that is there. Without it that is refused, unless the one there is damaged.
            when_busy: what to do while an earlier save is still being written: wait for it, or skip this one and
                return None.

        Raises `StepExistsError`, `StoreLockedError`, `OptionError`, what capturing the state raises,
        `UnsavableError` and `UnsupportedValueError` for what cannot be stored, `WriteFailedError` for an I/O error, and
        what an earlier save in the background has raised. No checkpoint that was there before is changed by it.
        """
        begun = time.perf_counter()
        _check_arguments(step, metrics, when_busy)
        if self._pending is not None and not self._pending.done and when_busy == "skip":
            return None
        self.wait()
        self._become_writer()
        if not overwrite and any(found.place.step == step and not found.problem for found in self._found()):
            raise StepExistsError(
                "there is a checkpoint of this step already",
                where=os.path.join(self.directory, name_of(step, 0)),
                remedy="overwrite=True replaces it; Store.restore says from which step to go on",
            )
        job = self._job(step, objects, dict(metrics or {}), pin, begun)
        if block:
            return self._write(job)
        self._staging.copy(job.drafts.values())
        blocked = time.perf_counter() - begun
        write = partial(self._write, job, self._staging.nbytes, blocked)
        self._pending = PendingSave(step, self._staging.nbytes, write)
        return self._pending

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until what is being written is durable. Raises what its write has raised, once, and
        `SaveTimeoutError`."""
        pending = self._pending
        if pending is None:
            return
        if pending.done and (pending.error is None or pending.is_reported):
            self._pending = None
            return
        pending.result(timeout_s)
        self._pending = None

    def _job(self, step: int, objects: Mapping[str, Any], metrics: dict[str, float], pin: bool, begun: float) -> _Job:
        parts = captured(objects).parts
        drafts = {path: draft(part.tree, path, as_tree=part.kind != MODULE) for path, part in parts.items()}
        steady = {path: _frozen(target.it) for path, target in targets_of(objects).items() if target.kind == MODULE}
        kinds = {path: part.kind for path, part in parts.items()}
        return _Job(step, kinds, drafts, steady, metrics, pin, begun, time.time())

    def _write(self, job: _Job, staging_bytes: int = 0, blocked: float | None = None) -> SavedStep:
        found = self._found()
        revision = max((one.place.revision + 1 for one in self._places() if one.place.step == job.step), default=0)
        final = os.path.join(self.directory, name_of(job.step, revision))
        with write_errors(final):
            written = self._write_directory(job, final, _newest(found))
        seconds = time.perf_counter() - job.begun
        with suppress(OSError):
            for one in self._places():
                if one.place.step == job.step and one.place.revision < revision:
                    self._discard(one.place)
        return SavedStep(
            job.step,
            final,
            sum(one.bytes_written for one in written),
            sum(one.bytes_linked for one in written),
            staging_bytes,
            seconds if blocked is None else blocked,
            seconds,
            self._prune() if self.keep is not None else (),
        )

    def _write_directory(self, job: _Job, final: str, before: _Found | None) -> list[Written]:
        beside = os.path.join(self.directory, unfinished_name(job.step))
        system.mkdir(beside)
        try:
            written = {path: self._write_entry(beside, path, job, before) for path in job.drafts}
            entries = {path: one.entry for path, one in written.items()}
            record = Record(self._store_name(), job.step, job.time, job.metrics, entries)
            if job.pin:
                with new_file(os.path.join(beside, PIN_FILE)):
                    pass
            with new_file(os.path.join(beside, RECORD_FILE)) as output:
                output.append(record.text())
            sync_directory(beside)
            self._lock.confirm()
            system.replace(beside, final)
            try:
                sync_directory(self.directory)
            except BaseException:
                system.replace(final, beside)
                raise
        except BaseException:
            remove_directory(beside)
            raise
        return list(written.values())

    def _write_entry(self, directory: str, path: str, job: _Job, before: _Found | None) -> Written:
        made, kind = job.drafts[path], job.kinds[path]
        if not made.tensors and made.tree is not None and set(made.tree) == {"value"}:
            return Written(Entry(kind, value=made.tree["value"]))
        record = before.record if before is not None else None
        old = None if before is None or record is None else before_of(before.place.path, record.entries.get(path))
        try:
            return write_entry(
                directory,
                path,
                kind,
                made,
                steady=job.steady.get(path, frozenset()),
                before=old,
                shard_bytes=self._shard_bytes,
            )
        except ValueError as error:
            if isinstance(error, ModelStateError):
                raise
            raise UnsavableError(
                "this is more than the header of a safetensors file holds",
                where=path,
                found=error,
                remedy="large values are better kept as tensors or arrays; shard_size_bytes= makes more files",
            ) from error

    # Restoring.

    def restore(
        self,
        objects: Mapping[str, Any],
        step: Step = "latest",
        *,
        rules: RulesOf = (),
        allow_missing: Iterable[str] = (),
        allow_unexpected: Iterable[str] = (),
        device: torch.device | str | None = None,
        map: bool = True,
        verify: bool = True,
        progress: bool | None = None,
        max_memory_bytes: int | None = None,
    ) -> RestoredStep:
        """Gives the objects back what was saved of them: all of them, or none.

        Of the latest checkpoints the newest one is taken that is whole; those that are not are reported by a
        `DamagedCheckpointWarning` and in `RestoredStep.skipped`. A plain value among the objects says that the value
        is wanted; it comes back in the result. The other arguments are those of `modelstate.load`, where patterns of
        names begin with the path of an object; `verify` compares everything with its digest before anything is used.

        Raises `StepNotFoundError`, `DamagedCheckpointError`, `ForeignCheckpointError`, and what `restore_objects`
        raises.
        """
        self.wait()
        asked = tuple(allow_missing), tuple(allow_unexpected)
        skipped: dict[int, str] = {}
        for found in self._candidates(step):
            try:
                record, parts = self._parts(found, verify)
            except (DamagedCheckpointError, ForeignCheckpointError, NewerManifestError, ReadFailedError) as error:
                if step != "latest":
                    raise
                skipped[found.place.step] = str(error)
                _warn(found.place, error)
                continue
            restored = restore_objects(
                objects,
                parts,
                rules=rules,
                allow_missing=asked[0],
                allow_unexpected=asked[1],
                device=device,
                map=map,
                progress=progress,
                max_memory_bytes=max_memory_bytes,
            )
            same = {one.name: getattr(restored, one.name) for one in fields(restored)}
            return RestoredStep(
                **same, step=record.step, time=record.time, metrics=dict(record.metrics), skipped=skipped
            )
        raise StepNotFoundError(
            "no checkpoint of the store can be restored" if skipped else "there is no checkpoint in the store",
            where=self.directory,
            found="; ".join(f"step {number}: {text}" for number, text in skipped.items()),
            remedy="look at the disk, or at a copy of the store" if skipped else "save one first",
        )

    def open(self, name: str, step: Step = "latest") -> Checkpoint:
        """The tensors and values of one object of a checkpoint, for whatever takes a `Checkpoint`.

        Raises `StepNotFoundError`, `DamagedCheckpointError`, `ForeignCheckpointError`.
        """
        self.wait()
        found = next((one for one in self._candidates(step) if not one.problem), None)
        record = self._record(found) if found is not None else None
        entry = record.entries.get(name) if record is not None else None
        if found is None or record is None or entry is None or not entry.index:
            raise StepNotFoundError(
                "there is no such object in the store",
                where=self.directory if found is None else found.place.path,
                expected=", ".join(key for key, one in record.entries.items() if one.index) if record else "",
                found=repr(name),
            )
        return contents.opened(found.place.path, entry)

    def _candidates(self, step: Step) -> list[_Found]:
        every = self._found()
        if step == "latest":
            return every[::-1]
        if type(step) is not int:
            raise OptionError("step= is the number of a step", expected='an int, or "latest"', found=repr(step))
        chosen = [found for found in every if found.place.step == step]
        if not chosen:
            raise StepNotFoundError(
                "there is no checkpoint of this step",
                where=self.directory,
                expected=", ".join(str(found.place.step) for found in every[-20:]) or "none is there",
                found=step,
            )
        return chosen

    def _record(self, found: _Found) -> Record:
        """Raises what keeps the checkpoint from being used."""
        record = read_record(found.place.path)
        mine = self._store_name(create=False)
        if (mine and record.store != mine) or record.step != found.place.step:
            raise ForeignCheckpointError(
                "the checkpoint was put here from another store, or under another step",
                where=found.place.path,
                expected=f"step {found.place.step} of the store {mine}",
                found=f"step {record.step} of the store {record.store}",
                remedy="open the store that it is from; ms.open reads what is in it by itself",
            )
        if problem := contents.why_not_whole(found.place.path, record.entries):
            raise damaged(found.place.path, problem)
        return record

    def _parts(self, found: _Found, verify: bool) -> tuple[Record, dict[str, Part]]:
        record, directory = self._record(found), found.place.path
        if verify:
            for entry in record.entries.values():
                contents.verify(directory, entry)
        parts = {}
        for path, entry in record.entries.items():
            is_module = entry.kind == MODULE and entry.index
            tree = contents.opened(directory, entry) if is_module else contents.value_of(directory, entry)
            parts[path] = Part(entry.kind, tree)
        return record, parts

    # What is there.

    def steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints that are whole, as far as their names and sizes say, from old to new."""
        return tuple(found.place.step for found in self._found() if not found.problem)

    def latest(self) -> int | None:
        """The highest of them; None where there is none."""
        return max(self.steps(), default=None)

    def infos(self) -> tuple[CheckpointInfo, ...]:
        """What is known of each checkpoint, damaged ones too, without reading tensors."""
        return tuple(map(_info, self._found()))

    def verify(self, step: int | None = None) -> dict[int, str]:
        """Reads checkpoints, one or all, and compares every byte with its digest.

        Returns what is wrong by the step; empty text where nothing is. Raises `StepNotFoundError`.
        """
        self.wait()
        return {
            found.place.step: self._problem(found)
            for found in (self._candidates(step) if step is not None else self._found())
        }

    def _problem(self, found: _Found) -> str:
        try:
            record = self._record(found)
            for entry in record.entries.values():
                contents.verify(found.place.path, entry)
                if not entry.index or entry.kind != MODULE:
                    contents.value_of(found.place.path, entry)
        except (ModelStateError, OSError) as error:
            return str(error)
        return ""

    def _places(self) -> list[_Found]:
        """Every revision of every step."""
        try:
            return [self._look(place) for place in places(self.directory)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ReadFailedError("the store cannot be read", where=self.directory, found=error) from error

    def _look(self, place: Place) -> _Found:
        try:
            record = self._record(_Found(place, None, ""))
        except (ModelStateError, OSError) as error:
            return _Found(place, None, str(error))
        return _Found(place, record, "")

    def _found(self) -> list[_Found]:
        """Of every step the newest revision that is whole, or the newest; from old to new."""
        best: dict[int, _Found] = {}
        for found in self._places():
            other = best.get(found.place.step)
            if other is None or not found.problem or other.problem:
                best[found.place.step] = found
        return [best[step] for step in sorted(best)]

    # Keeping.

    def prune(self, keep: Keep | int | None = None) -> tuple[int, ...]:
        """Takes away what `keep`, or the store's own rules, do not keep, and returns the steps.

        The newest checkpoint that is whole is never taken away. Raises `StoreLockedError`, `OptionError`, and
        `WriteFailedError` for an I/O error, after which the rest is still there.
        """
        self.wait()
        self._become_writer()
        with write_errors(self.directory):
            return self._prune(self.keep if keep is None else as_keep(keep), strict=True)

    def pin(self, step: int) -> None:
        """Keeps a checkpoint whatever `keep` says. Raises `StepNotFoundError`, `StoreLockedError`."""
        self.wait()
        (found,) = self._candidates(step)
        self._become_writer()
        path = os.path.join(found.place.path, PIN_FILE)
        with write_errors(path):
            if not os.path.exists(path):
                with new_file(path):
                    pass
                sync_directory(found.place.path)

    def unpin(self, step: int) -> None:
        """Lets `keep` decide again. Raises `StepNotFoundError`, `StoreLockedError`."""
        self.wait()
        (found,) = self._candidates(step)
        self._become_writer()
        path = os.path.join(found.place.path, PIN_FILE)
        with write_errors(path):
            if os.path.exists(path):
                system.unlink(path)
                sync_directory(found.place.path)

    def _prune(self, keep: Keep | None = None, strict: bool = False) -> tuple[int, ...]:
        every = self._found()
        stay = kept(map(_info, every), keep or self.keep)
        gone = []
        for found in every:
            if found.place.step not in stay:
                try:
                    for one in self._places():
                        if one.place.step == found.place.step:
                            self._discard(one.place)
                except OSError:
                    if strict:
                        raise
                    continue  # the next save tries again
                gone.append(found.place.step)
        return tuple(gone)

    def _discard(self, place: Place) -> None:
        """First the name, so that nobody sees half of it."""
        beside = os.path.join(self.directory, unfinished_name(place.step))
        system.replace(place.path, beside)
        remove_directory(beside)

    # The writer.

    def _become_writer(self) -> None:
        if self._is_writer and self._lock.held:
            return
        with write_errors(self.directory):
            _make_directory(self.directory)
            self._lock.acquire()
            self._is_writer = True
            for path in unfinished(self.directory):
                remove_directory(path)
        self._store_name()

    def _store_name(self, create: bool = True) -> str:
        """What the store is called: every checkpoint says of which it is."""
        path = os.path.join(self.directory, STORE_FILE)
        try:
            with open(path, encoding="utf-8") as file:
                return str(json.load(file)["store"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(
                "the name of the store cannot be read",
                where=path,
                found=error,
                remedy="take the file away: a new one is made by the next save",
            ) from error
        if not create:
            return ""
        names = set()
        for place in places(self.directory):
            with suppress(ModelStateError):
                names.add(read_record(place.path).store)
        name = names.pop() if len(names) == 1 else os.urandom(8).hex()
        with atomic_file(path, overwrite=True) as output:
            output.append(json.dumps({"format": 1, "store": name}).encode() + b"\n")
        return name

    def close(self) -> None:
        """Waits for what is being written, and lets others write. Raises what that write has raised."""
        try:
            self.wait()
        finally:
            self._is_writer = False
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lost(self) -> PendingSave | None:
        """A save in the background that has failed, of which nobody has heard."""
        pending = self._pending
        return pending if pending and pending.done and pending.error and not pending.is_reported else None


_stores: "weakref.WeakSet[Store]" = weakref.WeakSet()


@atexit.register
def _say_what_was_lost() -> None:
    for store in list(_stores):
        if (pending := store.lost()) is not None:
            print(f"modelstate: step {pending.step} was not saved: {pending.error}", file=sys.stderr)


def _directory(given: object) -> str:
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(text, str):
        raise SaveTargetError("a store is a directory", expected="a str or a pathlib.Path", found=repr(given)[:80])
    path = os.path.abspath(local_path(text))
    if os.path.lexists(path) and not os.path.isdir(path):
        raise SaveTargetError("a store is a directory", where=path, found="a file", remedy="take another path")
    return path


def _make_directory(path: str) -> None:
    if not os.path.isdir(path):
        above = os.path.dirname(path)
        _make_directory(above)
        with suppress(FileExistsError):
            system.mkdir(path)
        sync_directory(above)


def _check_arguments(step: object, metrics: object, when_busy: object) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise OptionError("step= is the number of a step", expected="an int, 0 or more", found=repr(step))
    numbers = isinstance(metrics, Mapping) and all(
        type(key) is str and isinstance(value, int | float) for key, value in metrics.items()
    )
    if metrics is not None and not numbers:
        raise OptionError("metrics= has numbers under names", expected='such as {"loss": 0.5}', found=repr(metrics))
    if when_busy not in ("wait", "skip"):
        raise OptionError("when_busy= says what to do", expected='"wait" or "skip"', found=repr(when_busy))


def _frozen(module: torch.nn.Module) -> frozenset[str]:
    """Names of what training does not change."""
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, param in named if not param.requires_grad)


def _newest(every: Sequence[_Found]) -> _Found | None:
    return next((found for found in reversed(every) if not found.problem), None)


def _info(found: _Found) -> CheckpointInfo:
    place, record = found.place, found.record
    files = () if record is None else [one for entry in record.entries.values() for one in entry.files.values()]
    return CheckpointInfo(
        step=place.step,
        time=record.time if record is not None else _changed(place.path),
        metrics=dict(record.metrics) if record is not None else {},
        pinned=os.path.exists(os.path.join(place.path, PIN_FILE)),
        intact=not found.problem,
        nbytes=sum(one.nbytes for one in files),
        path=place.path,
    )


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _warn(place: Place, error: Exception) -> None:
    warnings.warn(f"step {place.step} is passed over: {error}", DamagedCheckpointWarning, stacklevel=3)
